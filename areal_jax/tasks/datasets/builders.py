"""The tensorflow-datasets builder for problems in JSONL files.

Only this module imports tensorflow-datasets, and others import this module only to prepare or open problems.
tensorflow-datasets loads no TensorFlow as long as records are array_record and read through `as_data_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.util import DownloadError

from areal_jax.tasks.datasets.jsonl import parse_object
from areal_jax.tasks.errors import TaskError

COLUMNS = ("problem", "solution", "answer")
"""The fields of a problem."""

ParseRow = Callable[[Mapping[str, Any], str], dict[str, str]]
"""Function (a line's JSON object, file and line for messages) -> problem, a text for each of COLUMNS."""

VERSION = "1.0.0"
"""Version of the form in which data sets are stored; after a change, all data sets are prepared again."""


@dataclass(eq=False, kw_only=True)
class Files(tfds.core.BuilderConfig):
    """A data set's local `files` or `urls`, by split; `parse` makes a problem from a line's object."""

    files: dict[str, list[Path]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    parse: ParseRow


class ArealProblems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builder that stores problems as array_record, in the order of the lines in the source files."""

    VERSION = tfds.core.Version(VERSION)
    url_infos = None
    """Set to None, so that tfds does not look for checksums.

    The search would import importlib_resources, which may not be installed.
    """

    def _log_download_bytes(self) -> None:
        """Prints nothing, unlike the base class: stdout may be a command's JSON."""

    def _log_download_done(self) -> None:
        """Prints nothing, unlike the base class: stdout may be a command's JSON."""

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
                raise TaskError(f"{url} cannot be downloaded: {error}; check the network") from error
        return {split: self._generate_examples(paths, config.parse) for split, paths in files.items()}

    def _generate_examples(self, paths: list[Path], parse: ParseRow) -> Iterator[tuple[int, dict[str, str]]]:
        """Yields (number, fields) of each problem: one per non-blank line, numbered from 0 across all files.

        Raises TaskError for a line without a usable problem (the message names file and line), and if all
        files are empty.
        """
        count = 0
        for path in paths:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        yield count, parse(parse_object(line, where), where)
                        count += 1
        if not count:
            raise TaskError(
                f"{', '.join(map(str, paths))}: the files are empty; give files with one JSON object per line"
            )


def prepare(config: Files, data_dir: Path) -> Path:
    """Downloads and builds the data set `config` in a new folder below `data_dir`; returns that folder."""

    class Configured(ArealProblems, skip_registration=True):  # a builder warns of configs that it lacks
        name = ArealProblems.name
        BUILDER_CONFIGS: ClassVar[list[tfds.core.BuilderConfig]] = [config]

    builder = Configured(config=config.name, data_dir=data_dir, file_format="array_record")
    tfds.display_progress_bar(False)
    builder.download_and_prepare()
    return Path(builder.data_path)
