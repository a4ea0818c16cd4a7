"""
The kinds of statements that a store runs. Each names one of its store's collections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

Document = dict[str, Any]


@attrs.frozen
class Find:
    """
    One bounded read. Without a limit, of what is few by its nature.
    """

    collection: str
    filter: Document
    projection: Document | None = None
    sort: Sequence[tuple[str, int]] = ()
    limit: int = 0


@attrs.frozen
class Update:
    """
    One conditional write, of each of *many* documents or of one, all in one command.
    """

    collection: str
    filter: Document
    pipeline: list[Document] | Document
    many: bool = False
    upsert: bool = False


@attrs.frozen
class Insert:
    """
    A new document, unless its *unique* field has a value that is taken.

    The field *mark* tells one's own document, that an earlier try has left, from another's.
    """

    collection: str
    document: Mapping[str, Any]
    mark: str
    unique: str = "_id"


@attrs.frozen
class Delete:
    """
    One conditional removal, of *many* documents or of one.
    """

    collection: str
    filter: Document
    many: bool = False


@attrs.frozen
class Index:
    """
    An index by its name; *options* are those of ``createIndexes``.
    """

    collection: str
    name: str
    keys: Sequence[tuple[str, int]]
    options: Mapping[str, Any] = attrs.field(factory=dict)
