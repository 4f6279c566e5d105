"""Rows of data files and Hub data sets. A row that cannot be read is yielded as the reason, with where it stands."""

from __future__ import annotations

import csv
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from race_sweeps.config import DataConfig
from race_sweeps.errors import UserError

Row = dict[str, Any] | str
"""Fields of a row, or why there are none."""


def rows(data: DataConfig, key: str) -> Iterator[tuple[str, Row]]:
    """Where each row stands, and the row. `key`: of this data set in the configuration, for errors. Raises `UserError`
    when there is nothing to read."""
    if data.path is None:
        yield from _hub(data, key)
        return
    path = Path(data.path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{key}.path={path}: the name must end in one of {', '.join(_READERS)}")
    try:
        if not path.stat().st_size:
            raise UserError(f"{key}.path={path}: the file is empty")
        for place, row in read(path):
            yield f"{path}: {place}", row
    except OSError as error:
        raise UserError(f"{key}.path={path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{key}.path={path}: cannot be read as text ({error})") from None


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _object(line)


def _object(line: str) -> Row:
    try:
        return _mapping(json.loads(line))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error}); JSONL has one object a line"


def _mapping(row: Any) -> Row:
    return row if isinstance(row, dict) else f"not an object but a {type(row).__name__}"


def _json(path: Path) -> Iterator[tuple[str, Row]]:
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):  # also the usual name for JSON lines
        yield from _json_lines(path)
        return
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); give an array of objects, or one object a line") from None
    for number, row in enumerate(content, 1):
        yield f"row {number}", _mapping(row)


def _csv(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        names: list[Any] = list(reader.fieldnames or [])
        number = 0
        try:
            for number, row in enumerate(reader, 1):
                fields: dict[Any, Any] = dict(row)
                extra = fields.pop(None, None)
                missing = [name for name in names if fields[name] is None]
                wrong = (
                    f"{len(names) - len(missing)} fields" if missing else extra and f"{len(names) + len(extra)} fields"
                )
                yield f"row {number}", f"{wrong}, the header has {len(names)}" if wrong else fields
        except csv.Error as error:
            raise UserError(f"{path}: row {number + 1}: not CSV ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except ArrowException as error:
        raise UserError(f"{path}: row {number + 1}: cannot be read as Parquet ({error})") from None


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}


def _hub(data: DataConfig, key: str) -> Iterator[tuple[str, Row]]:
    if data.hub is None:
        raise UserError(f"{key}.path: data set {data.name} reads a file; set {key}.path=<JSONL, JSON, CSV or Parquet>")
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    if not _reachable(constants.ENDPOINT):  # what was downloaded before will do; without this, half a minute of retries
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        table = datasets.load_dataset(data.hub, data.subset, split=data.split)
    except Exception as error:  # no network, no such set, subset or split, a login: the libraries raise many kinds
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise UserError(
            f"{key}.hub={data.hub}: split {data.split!r} cannot be loaded from the Hub ({reason}); without a network "
            f"set {key}.path=<a local JSONL, JSON, CSV or Parquet file>"
        ) from None
    for number, row in enumerate(table, 1):
        yield f"{data.hub} {data.split}: row {number}", _mapping(row)


def _reachable(endpoint: str) -> bool:
    """Whether the Hub's name resolves, or a proxy is set that may know it."""
    parts = urlsplit(endpoint)
    if parts.hostname is None or parts.scheme in getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(parts.hostname, parts.port or parts.scheme))
    except OSError:
        return False
