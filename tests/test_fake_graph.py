"""The fake graph punishes the mistakes that a real KV cache would."""

import numpy as np
import pytest

from outrider.contracts import Graph, TopK
from outrider.errors import ContextError
from outrider.targets.fake import FakeDrafter, FakeGraph, VirtualClock, random_logits

TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=bool)  # two children of the first token


def graph(**options):
    return FakeGraph(7, seed=1, order=None, **options)


def last_row(tokens):
    return graph().forward(tokens, logits="last").logits[0]


def test_it_is_a_graph():
    assert isinstance(graph(), Graph)


def test_forward_gives_the_same_rows_in_one_go_and_step_by_step():
    whole = graph().forward([1, 2, 3]).logits
    fake = graph()
    for i, token in enumerate([1, 2, 3]):
        np.testing.assert_array_equal(fake.forward([token]).logits[0], whole[i])
        fake.commit([0])
    assert fake.tokens == [1, 2, 3]


def test_forward_never_moves_length_and_uncommitted_rows_are_dropped():
    fake = graph()
    fake.forward([1, 2])
    assert fake.length == 0
    fake.forward([3])
    fake.commit([0])
    assert fake.tokens == [3]


def test_a_wrong_commit_gives_other_logits():
    fake = graph()
    fake.forward([1, 2, 3])
    fake.commit([0, 2])
    assert not np.array_equal(fake.forward([4], logits="last").logits[0], last_row([1, 2, 3, 4]))


def test_a_hole_in_the_positions_gives_other_logits():
    rows = graph().forward([1, 2], positions=np.array([0, 2]), logits="last").logits
    assert not np.array_equal(rows[0], last_row([1, 2]))


def test_a_tree_row_sees_its_ancestors_alone():
    rows = graph().forward([1, 2, 3], np.array([0, 1, 1]), TREE).logits
    np.testing.assert_array_equal(rows[1], last_row([1, 2]))
    np.testing.assert_array_equal(rows[2], last_row([1, 3]))


def test_committing_a_tree_path_equals_running_it():
    fake = graph()
    fake.forward([1, 2, 3], np.array([0, 1, 1]), TREE)
    fake.commit([0, 2])
    np.testing.assert_array_equal(fake.forward([5], logits="last").logits[0], last_row([1, 3, 5]))


def test_truncate_forgets_the_tail():
    fake = graph()
    fake.forward([1, 2, 3])
    fake.commit([0, 1, 2])
    fake.truncate(1)
    np.testing.assert_array_equal(fake.forward([2], logits="last").logits[0], last_row([1, 2]))


def test_logits_can_be_asked_for_as_rows_last_none_and_top():
    rows = graph().forward([1, 2, 3]).logits
    np.testing.assert_array_equal(graph().forward([1, 2, 3], logits=[0, 2]).logits, rows[[0, 2]])
    np.testing.assert_array_equal(graph().forward([1, 2, 3], logits="last").logits, rows[2:])
    assert graph().forward([1, 2, 3], logits="none").logits is None
    top = graph().forward([1, 2, 3], logits=TopK(2)).logits
    np.testing.assert_array_equal(top.ids[:, 0], rows.argmax(axis=1))
    np.testing.assert_allclose(top.logsumexp, np.log(np.exp(rows.astype(np.float64)).sum(axis=1)), rtol=1e-6)


def test_hidden_states_follow_what_the_row_sees():
    hidden = graph(hidden_layers=(2,)).forward([1, 2], hidden=(2,)).hidden[2]
    again = graph(hidden_layers=(2,)).forward([1, 3], hidden=(2,)).hidden[2]
    np.testing.assert_array_equal(hidden[0], again[0])
    assert not np.array_equal(hidden[1], again[1])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: graph(widths=(1, 2)).forward([1, 2, 3]), ValueError),
        (lambda: graph(max_context=2).forward([1, 2, 3]), ContextError),
        (lambda: graph().forward([7]), ValueError),
        (lambda: graph().forward([]), ValueError),
        (lambda: graph().forward([1], hidden=(3,)), ValueError),
        (lambda: graph().truncate(1), ValueError),
    ],
)
def test_misuse_is_refused(call, error):
    with pytest.raises(error):
        call()


def test_costs_pass_on_the_clock_by_width():
    clock = VirtualClock()
    fake = graph(costs_s={1: 1.0, 3: 2.0}, clock=clock)
    fake.forward([1])
    fake.forward([1, 2])
    assert clock() == 2.5
    assert fake.forwards == [1, 2]


def test_large_vocabularies_depend_on_the_context_too():
    logits = random_logits(5000, seed=1)
    rows = {logits((1, token)).tobytes() for token in range(40)}
    assert len(rows) > 10


def test_a_tree_draft_lists_parents_first_and_keeps_to_k():
    drafter = FakeDrafter(random_logits(7), (2, 2, 1), "without_replacement")
    proposal = drafter.propose([1, 2], 9, None, np.random.default_rng(0))
    assert len(proposal) == 9
    assert all(parent < node for node, parent in enumerate(proposal.parents))
    assert proposal.tokens[0] != proposal.tokens[1]


def test_rows_that_were_kept_come_back_where_they_were_and_nowhere_else():
    fake = graph()
    fake.forward([1, 2, 3, 4])
    fake.commit(range(4))
    kept = fake.keep(2)
    for wrong in (4, 1):
        fake.truncate(wrong)
        with pytest.raises(ValueError, match=f"from 2 on do not follow the {wrong} "):
            fake.bring_back(kept)
        fake.truncate(1)
        fake.forward([2, 3, 4])
        fake.commit(range(3))
    fake.truncate(2)
    fake.bring_back(kept)
    assert fake.tokens == [1, 2, 3, 4]
    for wrong_kept in ([1], None, (2, None), (None, [])):
        with pytest.raises(ValueError, match="not what `keep`"):
            fake.bring_back(wrong_kept)
    for start in (-1, 5):
        with pytest.raises(ValueError, match="holds 4 tokens"):
            fake.keep(start)


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**32, 2**40])
def test_a_random_model_of_all_tokens_is_fixed_by_seed_and_context(seed):
    for context in [(), (0,), (5, 0, 299), tuple(range(40))]:
        row = random_logits(5, seed, order=None, scale=1.0)(context)
        rng = np.random.default_rng([seed, *(token + 1 for token in context)])
        np.testing.assert_array_equal(row, rng.standard_normal(5, dtype=np.float32))


def test_what_followed_a_hole_is_right_again_once_the_hole_is_cut_off():
    model = graph()
    model.forward([1, 2])
    model.commit([0, 1])
    model.forward([3], positions=np.array([5]))
    model.commit([0])
    assert not np.array_equal(model.forward([4], logits="last").logits[0], last_row([1, 2, 3, 4]))
    model.truncate(2)
    np.testing.assert_array_equal(model.forward([4], logits="last").logits[0], last_row([1, 2, 4]))
