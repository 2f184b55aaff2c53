"""A taskset for verifiers 0.4, with a harness: two questions, and the reward is the share of answers "7".

Where SEVENS_RECORD names a file, each trace is appended to it as a line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["SevensHarness", "SevensTaskset"]


class SevensTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def sevens(self, trace: vf.Trace) -> float:
        answers = [one.content or "" for one in trace.branches[-1].messages if one.role == "assistant"]
        value = sum(answer == "7" for answer in answers) / 2
        if record := os.environ.get("SEVENS_RECORD"):
            kept = [
                [branch.token_ids, branch.sampled_mask, branch.logprobs, trace.info.get("sampled")]
                for branch in trace.branches
            ]
            with Path(record).open("a") as file:
                file.write(json.dumps([self.data.idx, value, kept]) + "\n")
        return value


class SevensTaskset(vf.Taskset[SevensTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SevensTask]:
        for number in range(8):
            yield SevensTask(vf.TaskData(prompt=str(number)), self.config.task)


class SevensHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client, said = AsyncOpenAI(base_url=endpoint, api_key=secret), []
        for question in (data.prompt, "a"):
            said.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(
                model=ctx.model, messages=said, logprobs=True, extra_body={"return_token_ids": True}
            )
            (choice,) = answer.choices
            said.append(choice.message.model_dump(exclude_none=True))
            if choice.logprobs is not None:  # the server's own answer, not one of verifiers' train client
                logps = [one.logprob for one in choice.logprobs.content]
                trace.info.setdefault("sampled", []).append([choice.token_ids, logps])
        await client.close()
        return ProgramResult(0, "", "")
