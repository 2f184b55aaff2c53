"""From any model source to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_jax.config import make_config
from areal_jax.runtime.sources import explained, open_source


def convert(source: str, target: Path, dtype: str = "float32") -> dict[str, Any]:
    """Write the model that `model.source` names, a run's newest version too, as a folder for transformers.

    Figures of what was written. Raises ArealError for a source that does not exist, a target that does.
    """
    opened = open_source(make_config({"model": {"source": source}}), {})
    with explained("convert"):
        from areal_jax.models.huggingface import export_folder

        export_folder(target, opened.model.config, opened.load(None), dtype, tokenizer_from=opened.folder)
    return {
        "folder": str(target),
        "parameters": opened.model.parameter_count,
        "dtype": dtype,
        "has_tokenizer": opened.folder is not None,
    }
