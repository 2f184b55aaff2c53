"""JetStream's own Driver and LLMOrchestrator over our engine, in a process of their own.

Prints one JSON object: what the Driver streamed, and what our host decodes greedily for the same tokens. The
Driver kills its process when anything goes wrong in a thread of it, and its assertion on free slots is a race
that it loses whenever the last live slot ends; so one long request lives through the whole comparison.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys

from areal_jax.generation.engine import Engine
from areal_jax.generation.jetstream import JetStreamEngine, orchestrator, protocol
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import ByteTokenizer
from areal_jax.types import SampleId, Sampling, VersionedParams
from areal_jax.weights.memory import MemoryStore
from tests.generation.decoding import Heard, make_host, start

LENGTH = 1024  # a power of two, as the Driver's padding needs
PROMPTS = {"tokens": [(17, 4, 99), (200, 3, 3, 3, 78, 21, 45)], "text": ["ab", "what is 2 + 2?"]}
MAX_TOKENS = 12
"""A multiple of the steps a call: the Driver drops a call's tokens when the last of them is one too many."""


async def asked(served, request) -> tuple[list[int], str]:
    tokens: list[int] = []
    text = ""
    async for response in served.Decode(request):
        for sample in response.stream_content.samples:
            tokens += sample.token_ids
            text += sample.text
    return tokens, text


def by_tokens(tokens, max_tokens: int):
    content = protocol.DecodeRequest.TokenContent(token_ids=tokens)
    return protocol.DecodeRequest(token_content=content, max_tokens=max_tokens)


def by_text(text: str):
    content = protocol.DecodeRequest.TextContent(text=text)
    return protocol.DecodeRequest(text_content=content, max_tokens=MAX_TOKENS)


async def streamed(served) -> dict[str, list]:
    long = asyncio.create_task(asked(served, by_tokens((5, 6), LENGTH)))
    await asyncio.sleep(0)
    tokens = await asyncio.gather(*(asked(served, by_tokens(p, MAX_TOKENS)) for p in PROMPTS["tokens"]))
    texts = await asyncio.gather(*(asked(served, by_text(text)) for text in PROMPTS["text"]))
    assert not long.done(), "the long request ended first: make LENGTH larger"
    return {"tokens": [found for found, _ in tokens], "text": list(texts)}


def ours(engine: Engine, params: VersionedParams) -> list[list[int]]:
    """The greedy completions of the same prompts, each after a BOS, by our host."""
    heard, store, tokenizer = Heard(), MemoryStore(engine.canary), engine.get_tokenizer()
    store.publish(params)
    host = make_host(
        engine, store, heard, stops=(tokenizer.eos_id,), sampling=Sampling(0.0, max_tokens=MAX_TOKENS)
    )
    prompts = [*PROMPTS["tokens"], *(tokenizer.encode(text) for text in PROMPTS["text"])]
    for ordinal, prompt in enumerate(prompts):
        host.inbox.put(start(ordinal, 1, (tokenizer.bos_id, *prompt)))
    host.take_commands()
    while host.has_work:
        host.step()
    done = [heard.done[SampleId(ordinal, 0)] for ordinal in range(len(prompts))]
    return [trajectory.tokens[trajectory.loss_mask].tolist() for trajectory in done]


def main() -> None:
    root = logging.getLogger()
    process = {
        "modules": sorted({"seqio", "tensorflow"} & set(sys.modules)),
        "level": root.level,
        "handlers": [type(handler).__name__ for handler in root.handlers],
    }
    sizes = model_config("tiny", 258, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64, is_tied=False)
    engine = Engine(Model(sizes, ByteTokenizer()), slots=4, length=LENGTH, decode_steps=2, page_tokens=64)
    published = VersionedParams(3, engine.model.init(5), "seed 5")
    expected, params = ours(engine, published), engine.load_params(published)
    stock = JetStreamEngine(engine, Sampling(temperature=0.0, max_tokens=LENGTH))
    driver = orchestrator.Driver(
        prefill_engines=[stock],
        generate_engines=[stock],
        prefill_params=[params],
        generate_params=[params],
        interleaved_mode=True,
    )
    asyncio.run(report(driver, {"host": expected, "process": process}))


async def report(driver, found: dict) -> None:
    found["driver"] = await streamed(orchestrator.LLMOrchestrator(driver))
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # with the loop open: the long request is still being decoded, and its thread speaks to it


if __name__ == "__main__":
    main()
