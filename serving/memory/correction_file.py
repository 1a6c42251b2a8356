"""Correction memories on disk: Parquet with one row a pair, and what they belong to in its metadata."""

from pathlib import Path

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


def load_all(path: Path, *, identity: str) -> dict[str, PairCounts]:
    """What `save_counts` wrote. Raises ConfigError where there is no such file, or it belongs to something else."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"rule.table: {path} cannot be read as Parquet: {' '.join(str(error).split())}") from None
    found = (table.schema.metadata or {}).get(_IDENTITY, b"").decode()
    if found != identity:
        raise ConfigError(
            f"rule.table: {path} belongs to another tokenizer, target or drafter ({found or 'unnamed'}, this profile's "
            f"are {identity}), whose pairs mean nothing here; calibrate anew: python -m jobs calibrate csd"
        )
    seen: dict[str, dict[int, int]] = {}
    rescued: dict[str, dict[int, int]] = {}
    for row in table.to_pylist():
        pair = pair_of(row["draft_id"], row["target_id"])
        seen.setdefault(row["salt"], {})[pair] = row["seen"]
        if row["rescued"]:
            rescued.setdefault(row["salt"], {})[pair] = row["rescued"]
    return {salt: PairCounts(seen[salt], rescued.get(salt, {})) for salt in seen}


def load_counts(path: Path, *, identity: str, fingerprint: str) -> PairCounts:
    """Calibrated counts, which every tenant shares. Raises ConfigError where they are not those of `fingerprint`."""
    counts = load_all(path, identity=identity).get("", PairCounts())
    if counts.fingerprint != fingerprint:
        raise ConfigError(
            f"rule.table_hash: {path} hashes to {counts.fingerprint}, not to {fingerprint}; it is not the table that "
            "this profile was calibrated with"
        )
    return counts
