"""
The base of every store: whose document it is, what is refused, what is tried again.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mscheduler_sync._storage.mongo_store import MongoStore
from mscheduler_sync._storage.statement import Delete, Find, Index, Insert, Update
from mscheduler_sync.errors import StoreRejected, StoreUnavailable
from tests.support import Document

INDEXES: Final = (
    Index("plans", "name", [("name", 1)], {"unique": True}),
    Index("plans", "owner", [("owner", 1)], {"unique": True, "sparse": True}),
)


class PlanStore(MongoStore):
    """
    A store of a collection beside that of the tasks, as a feature would have it.
    """

    def __init__(self, collection: Collection[Any]) -> None:
        names = {"plans": f"{collection.name}.plans"}
        super().__init__(collection.database, names, INDEXES, collection.codec_options)


@pytest.fixture
def store(collection: Collection[Document]) -> PlanStore:
    store = PlanStore(collection)
    store.ensure_indexes()
    return store


@pytest.fixture
def plans(collection: Collection[Document]) -> Collection[Document]:
    return collection.database["tasks.plans"]


def plan(name: str, mark: str, **fields: Any) -> Insert:
    return Insert("plans", {"name": name, "mark": mark, **fields}, mark="mark", unique="name")


def test_an_insert_tells_its_own_document_from_anothers(store: PlanStore) -> None:
    """
    Repeated after a lost reply it finds what it has made; a key that is taken is no error.
    """
    assert store.insert(plan("a", "mine"))
    assert store.insert(plan("a", "mine"))
    assert not store.insert(plan("a", "another's"))
    assert store.insert_many([plan("a", "mine"), plan("a", "x"), plan("b", "y")]) == (
        [True, False, True],
        {},
    )
    found = store.read(Find("plans", {}, {"_id": 0}, [("name", 1)]))
    assert found == [{"name": "a", "mark": "mine"}, {"name": "b", "mark": "y"}]


def test_another_unique_index_is_a_refusal(store: PlanStore) -> None:
    """
    Of an insert, one of many, or an update: it is no question of whose document it is.
    """
    assert store.insert(plan("a", "m", owner=1))
    with pytest.raises(StoreRejected, match="owner"):
        store.insert(plan("b", "m", owner=1))
    inserted, errors = store.insert_many([plan("b", "m", owner=1), plan("c", "m")])
    assert (inserted, list(errors)) == ([False, True], [0])
    with pytest.raises(StoreRejected, match="owner"):
        store.update(Update("plans", {"name": "c"}, {"$set": {"owner": 1}}))


def test_an_upsert_that_met_another_is_run_again(
    store: PlanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Once: the second finds what the first has made.
    """
    statement = Update("plans", {"name": "a"}, {"$set": {"mark": "m"}}, upsert=True)
    update_one, met = Collection.update_one, [DuplicateKeyError("met another")]

    def meet(*arguments: Any, **options: Any) -> Any:
        if met:
            raise met.pop()
        return update_one(*arguments, **options)

    monkeypatch.setattr(Collection, "update_one", meet)
    assert store.update(statement) == (1, 1)
    met[:] = [DuplicateKeyError("met another")] * 2
    with pytest.raises(StoreUnavailable):
        store.update(statement)
    assert store.update(statement) == (1, 0)


def test_what_an_update_and_a_delete_match(store: PlanStore, plans: Collection[Document]) -> None:
    """
    One document, or each of many.
    """
    plans.insert_many([{"name": name, "n": 1} for name in "abcd"])
    grown = [{"$set": {"n": {"$add": ["$n", 1]}}}]
    assert store.update(Update("plans", {"n": 1}, grown)) == (1, 1)
    assert store.update(Update("plans", {"n": 1}, grown, many=True)) == (3, 3)
    assert store.count(Find("plans", {"n": 2}, limit=1)) == 4
    assert store.delete(Delete("plans", {"n": 2})) == 1
    assert store.delete(Delete("plans", {"n": 2}, many=True)) == 3
    assert store.read_one(Find("plans", {})) is None


def test_indexes_are_made_once(store: PlanStore, plans: Collection[Document]) -> None:
    """
    And again when they are old, or the collection may be another one.
    """
    names = {"_id_", *(index.name for index in INDEXES)}
    assert set(plans.index_information()) == names
    plans.drop_indexes()
    store.ensure_indexes()
    store.ensure_indexes(max_age_s=60)
    assert set(plans.index_information()) == {"_id_"}
    store.forget_indexes()
    store.ensure_indexes()
    assert set(plans.index_information()) == names
    plans.drop_indexes()
    store.ensure_indexes(max_age_s=0)
    assert set(plans.index_information()) == names
