"""Who feeds whom: no machine sends or receives a version twice, whoever comes and goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipstream.weight_sync.tree import TRAINER, FeedingTree


def test_replicas_of_one_machine_are_a_chain() -> None:
    tree = FeedingTree(["a"])
    assert [tree.feed(replica, "b", 1) for replica in range(4)] == [TRAINER, 0, 1, 2]
    assert tree.copies_sent("a") == 1
    assert tree.copies_sent("b") == 0


def test_machines_are_a_chain_once_the_trainer_sends_a_copy_from_each_of_its_own() -> None:
    tree = FeedingTree(["a", "b"])
    parents = [tree.feed(replica, host, 1) for replica, host in enumerate("cdef")]
    assert parents == [TRAINER, TRAINER, 0, 1]
    assert [tree.copies_sent(host) for host in "abcdef"] == [1, 1, 1, 1, 0, 0]


def test_what_the_network_does_not_carry_comes_from_the_trainer() -> None:
    tree = FeedingTree(["a"])
    assert tree.feed(0, "b", 1) == TRAINER
    assert tree.feed(1, "a", 1) == TRAINER
    assert tree.feed(2, "a", 1) == TRAINER
    assert tree.copies_sent("a") == 1


def test_only_equal_replicas_feed_one_another() -> None:
    tree = FeedingTree(["a"])
    assert [tree.feed(0, "b", 2), tree.feed(1, "b", 1), tree.feed(2, "b", 2)] == [TRAINER, TRAINER, 0]


def test_without_relays_all_come_from_the_trainer() -> None:
    tree = FeedingTree(["a"], relays=False)
    assert {tree.feed(replica, "b", 1) for replica in range(3)} == {TRAINER}


def test_those_that_a_lost_replica_fed_are_fed_by_others() -> None:
    tree = FeedingTree(["a"])
    for replica in range(3):
        tree.feed(replica, "b", 1)
    assert tree.leave(0) == [1]
    assert tree.feed(1, "b", 1) == TRAINER, "its own child cannot feed it"
    assert tree.parent(2) == 1
    assert tree.feed(0, "b", 1) == 2
    assert tree.leave(2) == [0]
    assert tree.feed(0, "b", 1) == 1, "a parent that was lost is no reason against another"


def test_a_parent_that_did_not_work_is_not_tried_again_before_it_has_been_away() -> None:
    tree = FeedingTree(["a"])
    assert [tree.feed(0, "b", 1), tree.feed(1, "b", 1)] == [TRAINER, 0]
    assert tree.feed(1, "b", 1) == TRAINER, "its link to 0 broke"
    assert tree.feed(1, "b", 1) == TRAINER, "still"
    tree.leave(0)
    assert tree.feed(0, "b", 1) == 1
    tree.leave(1)
    tree.feed(0, "b", 1)
    assert tree.feed(1, "b", 1) == 0


EVENTS = st.lists(st.tuples(st.sampled_from(["join", "leave", "break"]), st.integers(0, 7)), max_size=60)


@given(EVENTS, st.lists(st.sampled_from("abcd"), min_size=8, max_size=8), st.sets(st.sampled_from("ab"), min_size=1))
def test_any_comings_and_goings(events: list[tuple[str, int]], hosts: list[str], sources: set[str]) -> None:
    tree = FeedingTree(sources)
    present: set[int] = set()
    has_broken = False
    for event, replica in events:
        if event == "leave":
            present.discard(replica)
            for orphan in tree.leave(replica):
                assert orphan in present
                tree.feed(orphan, hosts[orphan], 1)
        elif event == "join" and replica not in present:
            present.add(replica)
            tree.feed(replica, hosts[replica], 1)
        elif event == "break" and replica in present:
            has_broken = True
            last = tree.parent(replica)
            assert tree.feed(replica, hosts[replica], 1) != last or last == TRAINER
        for one in present:
            path, at = [], one
            while at != TRAINER:
                assert at in present, f"{one} is fed by {path}, of which the last has gone"
                assert at not in path, "in a circle"
                path.append(at)
                parent = tree.parent(at)
                assert parent is not None
                at = parent
        assert all(tree.parent(other) is None for other in set(range(8)) - present)
        if has_broken:
            continue
        # As in a broadcast: a copy of a version goes over the network into each machine once, and out of each once.
        arrivals = Counter(
            hosts[one]
            for one in present
            for parent in [tree.parent(one)]
            if hosts[one] not in sources and (parent == TRAINER or hosts[parent] != hosts[one])
        )
        assert all(count == 1 for count in arrivals.values()), arrivals
        assert all(tree.copies_sent(host) <= 1 for host in "abcd")
