"""Beginning of an audit's page: the same sections as `vembed data` shows, of the rows that the audit has read."""

from __future__ import annotations

from vembed.config.schema import TrainConfig
from vembed.data.examples import Example
from vembed.data.messages import joined, listed
from vembed.data.overlap import find_overlap, warnings_of
from vembed.data_tools.init.data_page import sections
from vembed.data_tools.init.sections import Section
from vembed.mining.audit_contents import per_source
from vembed.mining.config import AuditConfig
from vembed.mining.findings import Texts
from vembed.mining.mining_run import Inputs
from vembed.mining.record_tables import FileTable


class _Examples:
    """The rows of an audit as examples of their sources."""

    def __init__(self, data: Texts) -> None:
        self._data = data
        self.names = data.names
        self.sizes = tuple(per_source(data).values())

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> Example:
        return self._data.examples[index]

    def source_of(self, index: int) -> int:
        """Return the number of the source of a row."""
        return self._data.sources[index]


def data_sections(
    config: AuditConfig, inputs: Inputs, data: Texts, validation: Texts | None
) -> list[Section]:
    """Return the sections. Of the model only its tokenizer is read, if it is on this machine."""
    examples = _Examples(data)
    read = [*inputs.summary()]
    for table in inputs.rows.tables:
        if isinstance(table, FileTable):
            read += [f"left out: {problem}" for problem in joined(table.index.problems)]
            if table.index.unused:
                read.append(f"{table.name}: not used: {listed(table.index.unused)}")
    if validation is not None:
        read.append(
            f"validation: {len(validation):,d} rows of {', '.join(validation.names)}"
        )
        pairs = [
            (one.query, item) for one in validation.examples for item in one.positives
        ]
        read += [
            f"warning: {one}" for one in warnings_of(find_overlap(examples, pairs))
        ]
    return sections(
        examples,
        read,
        None if config.model_name is None else _model_config(config, config.model_name),
    )


def _model_config(config: AuditConfig, name: str) -> TrainConfig:
    names = ("query_prompt", "document_prompt", "max_length", "trust_remote_code")
    given = config.model_dump(include=set(names), exclude_none=True)
    return TrainConfig(model_name=name, data_path="unused", **given)
