"""The tensorflow-datasets builder of problems in JSONL files. Imported where problems are prepared or opened.

tensorflow-datasets is imported here and nowhere else; it brings no TensorFlow as long as records are
array_record and read through `as_data_source`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.util import DownloadError

from areal_jax.tasks.jsonl import parse_object
from areal_jax.tasks.problems import COLUMNS, ParseRow
from areal_jax.tasks.task import TaskError

VERSION = "1.0.0"
"""Of what is stored; a new one prepares anew."""


@dataclass(eq=False, kw_only=True)
class Files(tfds.core.BuilderConfig):
    """Where a data set's problems come from: files here, or `urls` to download them from, by split."""

    files: dict[str, list[Path]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    parse: ParseRow


class ArealProblems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Problems in the order of their lines, as array_record."""

    VERSION = tfds.core.Version(VERSION)
    url_infos = None
    """No list of checksums; looking for one imports importlib_resources, which may be missing."""

    def _log_download_bytes(self) -> None:
        """Says nothing: its stdout may be somebody's JSON."""

    def _log_download_done(self) -> None:
        """Says nothing, as above."""

    def _info(self) -> tfds.core.DatasetInfo:
        # Unshuffled, records keep the order of the lines: prompt i is line i.
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({name: tfds.features.Text() for name in COLUMNS}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        config = self.builder_config
        assert isinstance(config, Files)
        files: dict[str, list[Path]] = dict(config.files)
        for split, url in config.urls.items():
            try:
                files[split] = [Path(dl_manager.download(url))]
            except (OSError, DownloadError) as error:
                raise TaskError(f"{url} cannot be downloaded: {error}") from error
        return {split: self._generate_examples(paths, config.parse) for split, paths in files.items()}

    def _generate_examples(self, paths: list[Path], parse: ParseRow) -> Iterator[tuple[int, dict[str, str]]]:
        """The rows of the files, one after the other, numbered. Raises TaskError that names file and line."""
        count = 0
        for path in paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield count, parse(parse_object(line, where), where)
                        count += 1
        if not count:
            raise TaskError(f"{', '.join(map(str, paths))}: there is not one line; one object a line")


def prepare(config: Files, data_dir: Path) -> Path:
    """Build the data set below `data_dir`, downloads included; the folder that holds it."""

    class Configured(ArealProblems, skip_registration=True):  # a builder warns of a config it does not list
        name = ArealProblems.name
        BUILDER_CONFIGS: ClassVar[list[tfds.core.BuilderConfig]] = [config]

    builder = Configured(config=config.name, data_dir=data_dir, file_format="array_record")
    tfds.display_progress_bar(False)
    builder.download_and_prepare()
    return Path(builder.data_path)


def size(folder: Path, split: str) -> int:
    """The number of problems of a split. Raises KeyError for a split that the folder lacks."""
    return tfds.builder_from_directory(folder).info.splits[split].num_examples


def source(folder: Path, split: str) -> Any:
    """The problems of a split by index; texts are bytes."""
    builder: Any = tfds.builder_from_directory(folder)
    return builder.as_data_source(split=split)
