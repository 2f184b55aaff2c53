"""llama.cpp through llama-cpp-python: parallel sequences in one batch, F16, as JSON.

PEER_GGUF=FILE python tests/peers/llama_decode.py SHAPE SLOTS DTYPE PROMPT TOKENS REPEATS

FILE holds the model in F16; SHAPE and DTYPE are ignored. Each step decodes one token for every sequence and
takes the likeliest from its logits.
"""

from __future__ import annotations

import os
import sys
import time

import llama_cpp.llama_cpp as llama
import numpy as np
from timing import report_seconds


def main(slots: int, prompt: int, tokens: int, repeats: int) -> None:
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(
        os.environ["PEER_GGUF"].encode(), llama.llama_model_default_params()
    )
    settings = llama.llama_context_default_params()
    settings.n_ctx = slots * (prompt + tokens + 8)
    settings.n_batch = settings.n_ubatch = slots * prompt
    settings.n_seq_max = slots
    settings.n_threads = settings.n_threads_batch = 2
    context = llama.llama_init_from_model(model, settings)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(slots * prompt, 0, 1)

    def decode(ids: np.ndarray, start: int) -> None:
        """ids (slots, n): their next n tokens, from position `start`; logits of the last of each."""
        count = ids.shape[1]
        batch.n_tokens = ids.size
        for i, (row, at) in enumerate(np.ndindex(*ids.shape)):
            batch.token[i], batch.pos[i] = int(ids[row, at]), start + at
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = at == count - 1
        assert llama.llama_decode(context, batch) == 0

    def likeliest(count: int) -> np.ndarray:
        rows = (llama.llama_get_logits_ith(context, (row + 1) * count - 1) for row in range(slots))
        return np.array([np.ctypeslib.as_array(row, (vocab,)).argmax() for row in rows])[:, None]

    prompts = np.random.default_rng(0).integers(2, vocab, (slots, prompt))
    steps, wholes = [], []
    for repeat in range(repeats + 1):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        started = time.perf_counter()
        decode(prompts, 0)
        ids, begun = likeliest(prompt), time.perf_counter()
        for at in range(tokens):
            decode(ids, prompt + at)
            ids = likeliest(1)
        ended = time.perf_counter()
        if repeat:
            steps.append((ended - begun) / tokens)
            wholes.append(ended - started)
    report_seconds(steps, wholes)


if __name__ == "__main__":
    main(int(sys.argv[2]), *map(int, sys.argv[4:7]))
