"""Which replica a request goes to: a conversation comes back to the one that has read it."""

from __future__ import annotations

import hashlib
import json
import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


def beginning_of(body: bytes) -> str:
    """What all turns of a conversation have in common, in short; "" for what is none.

    That is all up to the first message of the user, with the instructions.
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
    """Of requests with the same beginning each goes to the same replica, while that takes requests;
    the others to one of two by chance, whichever has less to do."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """In the order in which they are asked."""
        some = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        beginning = "" if pending_request is None else pending_request.kwargs.get("beginning", "")
        if not beginning or not some:
            return [some]

        # One replica more or less moves few conversations.
        def rank(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{beginning} {replica.replica_id.unique_id}".encode()).digest()

        return [[max(candidate_replicas, key=rank)], some]
