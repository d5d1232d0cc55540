"""Routing of requests: the turns of a conversation go to the same replica and its prefix cache."""

from __future__ import annotations

import hashlib
import json
import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


def beginning_of(body: bytes) -> str:
    """A hash of what all turns of a conversation share, up to the first user message.

    "" if the body is not a conversation.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    messages = fields.get("messages", fields.get("input"))
    if not isinstance(messages, list):
        return ""
    head = [fields.get(name) for name in ("model", "instructions", "system", "tools")]
    for message in messages:
        head.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            return hashlib.sha256(json.dumps(head).encode()).hexdigest()
    return ""


class BeginningRouter(RequestRouter):
    """Sends requests with the same beginning to the same replica while it accepts them.

    Other requests go to the less busy of two random replicas.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, in order of preference."""
        some = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        beginning = "" if pending_request is None else pending_request.kwargs.get("beginning", "")
        if not beginning or not some:
            return [some]

        # Rendezvous hashing: adding or removing a replica moves few conversations.
        def rank(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{beginning} {replica.replica_id.unique_id}".encode()).digest()

        return [[max(candidate_replicas, key=rank)], some]
