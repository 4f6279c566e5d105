"""Read what an offline W&B run holds, from its own `.wandb` file.

wandb has no Python reader for it. The file is a LevelDB log (7-byte W&B header; 32 KiB blocks; each record: CRC-32 of
type and data, length, type: whole, first, middle or last part) of protobuf `wandb_internal_pb2.Record`s. Format:
https://github.com/google/leveldb/blob/main/doc/log_format.md; header and CRC as wandb 0.31 writes them (tests).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from race_sweeps.errors import UserError

BLOCK = 32768
HEADER = 7  # of the file, and of each record
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """Content of one file. `history`: its rows in order; numbers beyond 2^53 are floats there. `metrics`: metric name
    or glob to its x-axis. `staged`: other files that an upload needs. `finished`: it has an exit record, which a killed
    writer does not leave."""

    run_id: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    staged: list[str] = field(default_factory=list)
    finished: bool = False


def read(path: Path) -> OfflineRun:
    """The run in a `.wandb` file. A torn tail ends it silently. Raises `UserError` when it is no such file."""
    from wandb.proto import wandb_internal_pb2 as protocol

    run = OfflineRun()
    for data in records(path):
        record = protocol.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.group, run.job_type = record.run.run_id, record.run.run_group, record.run.job_type
            run.tags = list(record.run.tags)
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "history":
            row: dict[str, Any] = {}
            _update(row, record.history.item)
            run.history.append(row)
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "summary":
            _update(run.summary, record.summary.update)
        elif kind == "artifact":
            run.staged += [entry.local_path for entry in record.artifact.manifest.contents if entry.local_path]
        elif kind == "exit":
            run.finished = True
    return run


def _update(into: dict[str, Any], items: Any) -> None:
    for item in items:
        into["/".join(item.nested_key) or item.key] = json.loads(item.value_json)


def records(path: Path) -> Iterator[bytes]:
    """Payloads of the log's records, in order, up to the first one that is torn or damaged."""
    content = path.read_bytes()
    if content[:4] != b":W&B":
        raise UserError(
            f"{path}: not a .wandb file; remove the folder it is in, it is built again from the run's folder"
        )
    position, parts = HEADER, b""
    while position + HEADER <= len(content):
        left = BLOCK - position % BLOCK
        if left < HEADER:  # a record's header never crosses blocks
            position += left
            continue
        checksum, length, kind = struct.unpack("<IHB", content[position : position + HEADER])
        data = content[position + HEADER : position + HEADER + length]
        if length > left - HEADER or len(data) < length or checksum != _checksum(kind, data):
            return
        position += HEADER + length
        parts = data if kind in (WHOLE, FIRST) else parts + data
        if kind in (WHOLE, LAST):
            yield parts


def _checksum(kind: int, data: bytes) -> int:
    return zlib.crc32(bytes([kind]) + data)
