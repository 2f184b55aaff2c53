"""The worker's program with an environment that does what each task's index says, to test the protocol."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, os.environ["OUTSIDE_FOLDER"])

import outside_worker

RIGHT, RAISES, EXITS, WAITS, BLOCKS, CHATTERS, CHATS = range(7)


class Stub:
    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("needs"):
            __import__(settings["needs"])
        self._settings = settings

    def prompts(self) -> list[Any]:
        time.sleep(self._settings.get("list_s", 0))
        return [[{"role": "user", "content": str(index)}] for index in range(7)]

    async def run(self, index: int, base_url: str) -> dict[str, Any]:
        if index == RAISES:
            raise LookupError("no such key")
        if index == EXITS:
            sys.stderr.write("the library is broken\n")
            os._exit(3)
        if index == WAITS:
            await asyncio.sleep(1000)
        if index == BLOCKS:
            time.sleep(1000)
        if index == CHATTERS:
            sys.stdout.write("printed by a library\n")
            child = subprocess.Popen(["sleep", "1000"])
            return {"value": child.pid, "parts": {}, "note": str(os.getpid())}
        if index == CHATS:
            texts = []
            while len(texts) < 9:
                said = [{"role": "user", "content": text} for text in ("begin", *texts)]
                answer = await asyncio.to_thread(outside_worker._chat, base_url, said[-1:])
                if answer is None:
                    raise RuntimeError("the policy is silent")
                texts.append(answer)
        return {"value": 0.5, "parts": {"index": index}, "note": base_url}


if __name__ == "__main__":
    outside_worker.KINDS["textarena"] = outside_worker.KINDS["verifiers"] = Stub
    asyncio.run(outside_worker.main(sys.argv[1]))
