"""Bodies of `/inference/v1/generate`, vLLM's interface for token ids, as the client of verifiers sends them.

A request gives all tokens before the answer; its answer has each sampled id and log-prob.
"""

from __future__ import annotations

import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from areal_jax.episodes.chats import TokenRequest
from areal_jax.episodes.episode import Turn
from areal_jax.serving.bodies import Stop
from areal_jax.serving.requests import invalid


class GenerateSampling(BaseModel):
    """What of `sampling_params` is used; stop_token_ids is not: a turn ends with the run's end token."""

    model_config = ConfigDict(extra="ignore")
    max_tokens: int | None = Field(default=None, ge=1)
    stop: Stop | None = None
    n: int | None = Field(default=None, ge=1, le=1)


class GenerateBody(BaseModel):
    """What of a request is used; clients may send more."""

    model_config = ConfigDict(extra="ignore")
    token_ids: list[int] = Field(min_length=1)
    sampling_params: GenerateSampling = GenerateSampling()
    stream: bool | None = None
    features: Any = None
    content_parts: Any = None


def token_request(body: GenerateBody, vocab_size: int) -> TokenRequest:
    """Returns the request; raises RequestError for an unknown id, for images, and for a stream."""
    for token in body.token_ids:
        if not 0 <= token < vocab_size:
            raise invalid(
                f"token_ids contains {token}, but the policy's ids are 0 to {vocab_size - 1}; render prompts "
                "with the policy's tokenizer"
            )
    if body.features is not None or body.content_parts is not None:
        raise invalid("the policy reads text alone; send no images, videos or sounds")
    if body.stream:
        raise invalid("stream=true: a turn is sent once it is complete; leave stream out")
    sampling = body.sampling_params
    return TokenRequest(tuple(body.token_ids), sampling.max_tokens, tuple(sampling.stop or ()))


def generated(turn: Turn, prompt_tokens: int) -> dict[str, Any]:
    """Returns the answer: ids, log-probs, and as an extension the policy version of each token."""
    ids = turn.tokens.tolist()
    logprobs = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(ids, turn.logp.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": logprobs},
        "finish_reason": turn.stop_reason,
        "versions": turn.versions.tolist(),
    }
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "total_tokens": prompt_tokens + len(ids),
    }
    return {"request_id": f"gen-{secrets.token_hex(12)}", "choices": [choice], "usage": usage}
