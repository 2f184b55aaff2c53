"""The page on a task and a model of one's own: its commands in an empty folder, launches as dry runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_jax.config.loading import load_config, resolved
from areal_jax.models.io.gguf import smollm2_gguf
from areal_jax.types import ArealError
from tests.programs import unavailable
from tests.test_docs import DOCS, blocks, rows_of, run_as_printed

PAGE = DOCS / "own_task.md"
RECIPE = DOCS.parent / "configs" / "qwen2.5_1.5b_gsm8k_8gpu.yaml"
NEEDS_GPUS = re.compile(r"\s+# (a GPU|8 GPUs)(:.*)?$")


def commands() -> list[str]:
    return "".join(blocks(PAGE, "sh")).replace("\\\n", "").splitlines()


def write_files(folder: Path) -> None:
    """The page's files: data, task and config."""
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text(blocks(PAGE, "json")[0])
    for block in [*blocks(PAGE, "python"), *blocks(PAGE, "yaml")]:
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block)


def test_the_config_has_the_sizes_of_the_recipe(tmp_path: Path):
    write_files(tmp_path)
    page, recipe = resolved(load_config(tmp_path / "mine.yaml")), resolved(load_config(RECIPE))
    assert page.pop("tasks") == {"my_task:Mine": {"folder": "data"}} and recipe.pop("tasks") == {"gsm8k": {}}
    for own in ("run", "model", "launch"):
        page.pop(own), recipe.pop(own)
    assert page == recipe


@pytest.mark.soak
def test_every_command_that_needs_no_gpu_works_in_an_empty_folder(tmp_path: Path):
    try:
        smollm2_gguf()
    except ArealError as error:
        unavailable(str(error))
    write_files(tmp_path)
    (tmp_path / "models").mkdir()
    run_as_printed("areal-jax convert smollm2 models/mine", tmp_path)
    printed = {}
    for command in commands():
        bare = NEEDS_GPUS.sub("", command).replace("$PWD", str(tmp_path))
        if bare == command:
            printed[command] = run_as_printed(bare, tmp_path)
        elif "mine.yaml" in bare and "launch local" in bare:
            printed[command] = run_as_printed(f"{bare} launch.accelerator=cpu --dry-run", tmp_path)
        elif "launch slurm" in bare:
            printed[command] = run_as_printed(bare.replace(" -- ", " --dry-run -- "), tmp_path)
            assert "--gpus-per-node=8" in printed[command] and "--partition=gpu" in printed[command]
    assert (
        len(printed) == len(commands()) - 2
    )  # the evaluation on a GPU, and the launch of a run that is not there
    assert len(rows_of(tmp_path / "runs" / "trial")) == 3
    assert "What is 3 + 4?" in printed["areal-jax inspect runs/trial 0/0 --allow-code"]
    assert printed["areal-jax audit runs/trial"].endswith("ok\n")
    assert (tmp_path / "exported" / "config.json").is_file()
