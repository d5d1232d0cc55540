"""Routing of requests: the turns of a conversation go to the same replica and its prefix cache."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# The part of a prompt that decides, in characters or tokens: most of what a prefix cache reuses
# begins there, and short prompts have nothing to reuse.
_BLOCK: dict[type, int] = {str: 512, list: 128}


def beginning_of(body: bytes) -> str:
    """A hash of what all turns of a conversation share, up to the first user message, or of the
    first part of a long prompt.

    "" if the body is neither.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    messages = fields.get("messages", fields.get("input"))
    prompt = fields.get("prompt")
    if isinstance(prompt, str | list) and len(prompt) >= _BLOCK[type(prompt)]:
        return _hash([fields.get("model"), prompt[: _BLOCK[type(prompt)]]])
    if not isinstance(messages, list):
        return ""
    head = [fields.get(name) for name in ("model", "instructions", "system", "tools")]
    for message in messages:
        head.append(message)
        if isinstance(message, dict) and message.get("role") == "user":
            return _hash(head)
    return ""


def _hash(head: list[Any]) -> str:
    return hashlib.sha256(json.dumps(head).encode()).hexdigest()


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
