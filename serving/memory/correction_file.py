"""Correction memories on disk: Parquet with one row a pair, and what they belong to in its metadata."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serving.errors import ConfigError
from serving.memory.correction import PairCounts, ids_of_pair, pair_of

SCHEMA = pa.schema(
    [
        ("salt", pa.string()),
        ("draft_id", pa.int32()),
        ("target_id", pa.int32()),
        ("seen", pa.int64()),
        ("rescued", pa.int64()),
    ]
)
_IDENTITY = b"drafthouse.identity"
# What pyarrow raises for a damaged file or one of other columns; most of its own errors are of two families.
_UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)


def save_counts(path: Path, counts: dict[str, PairCounts], *, identity: str) -> None:
    """Counts by tenant; all or nothing: the file appears under its name only when it is whole."""
    rows = [
        (salt, *ids_of_pair(pair), seen, one.rescued.get(pair, 0))
        for salt, one in counts.items()
        for pair, seen in sorted(one.seen.items())
    ]
    columns = list(zip(*rows, strict=True)) or [()] * len(SCHEMA)
    table = pa.table(dict(zip(SCHEMA.names, columns, strict=True)), schema=SCHEMA)
    partial = path.with_name(path.name + ".partial")
    pq.write_table(table.replace_schema_metadata({_IDENTITY: identity.encode()}), partial, compression="zstd")
    partial.replace(path)


def load_all(path: Path, *, identity: str, field: str = "rule.table") -> dict[str, PairCounts]:
    """What `save_counts` wrote.

    Raises ConfigError, with the `field` that names the file, where it is missing, damaged or of something else.
    """
    if not path.is_file():
        raise ConfigError(f"{field}: {path}: no such file")
    try:
        table = pq.ParquetFile(path).read()
    except _UNREADABLE as error:
        raise ConfigError(f"{field}: {path} cannot be read as Parquet: {' '.join(str(error).split())}") from None
    found = (table.schema.metadata or {}).get(_IDENTITY, b"").decode(errors="replace")
    if found != identity:
        raise ConfigError(
            f"{field}: {path} belongs to another tokenizer, target or drafter ({found or 'unnamed'}, this profile's "
            f"are {identity}), whose pairs mean nothing here; calibrate anew: python -m jobs calibrate csd"
        )
    seen: dict[str, dict[int, int]] = {}
    rescued: dict[str, dict[int, int]] = {}
    try:
        rows = _checked_rows(table)
    except _UNREADABLE as error:
        raise ConfigError(f"{field}: {path} is no table of counts: {' '.join(str(error).split())}") from None
    for row in rows:
        pair = pair_of(row["draft_id"], row["target_id"])
        seen.setdefault(row["salt"], {})[pair] = row["seen"]
        if row["rescued"]:
            rescued.setdefault(row["salt"], {})[pair] = row["rescued"]
    return {salt: PairCounts(seen[salt], rescued.get(salt, {})) for salt in seen}


def _checked_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows of SCHEMA in `table`. Raises one of _UNREADABLE."""
    counts = table.select(SCHEMA.names).cast(SCHEMA)
    counts.validate(full=True)
    rows: list[dict[str, Any]] = counts.to_pylist()
    for place, row in enumerate(rows):
        if None in row.values() or min(row[name] for name in SCHEMA.names[1:]) < 0:
            raise ValueError(f"row {place} has an empty or negative cell")
    return rows


def load_counts(path: Path, *, identity: str, fingerprint: str) -> PairCounts:
    """Calibrated counts, which every tenant shares. Raises ConfigError where they are not those of `fingerprint`."""
    counts = load_all(path, identity=identity).get("", PairCounts())
    if counts.fingerprint != fingerprint:
        raise ConfigError(
            f"rule.table_hash: {path} hashes to {counts.fingerprint}, not to {fingerprint}; it is not the table that "
            "this profile was calibrated with"
        )
    return counts
