import pickle
from pathlib import Path

import numpy as np
import pytest

from flash_train.training.data.order import BLOCK_ROWS, Mixture, ShuffledWindows, WindowOrder, block_shares
from flash_train.training.data.permutation import Permutation
from flash_train.training.data.store import Tokens


def epoch_of(order: WindowOrder, epoch: int) -> np.ndarray:
    return order.starts(np.arange(epoch * order.windows, (epoch + 1) * order.windows))


def test_an_epoch_visits_disjoint_windows_inside_the_text_in_another_order_each_time():
    order = WindowOrder(1009, sequence_length=13, seed=5)
    epochs = [epoch_of(order, epoch) for epoch in range(4)]
    for starts in epochs:
        assert np.array_equal(np.diff(np.sort(starts)), np.full(order.windows - 1, 13))
        assert starts.min() >= 0 and starts.max() + 13 + 1 <= 1009
    assert len({starts.tobytes() for starts in epochs}) == 4
    assert len({int(starts.min()) for starts in epochs}) > 1, "the phase never changed"


@pytest.mark.parametrize("tokens", [14, 15, 27, 28, 39, 40, 41, 1009])
def test_every_token_is_a_target_in_some_epoch(tokens: int):
    order = WindowOrder(tokens, sequence_length=13, seed=0)
    starts = order.starts(np.arange(400 * order.windows))
    assert set((starts[:, None] + np.arange(1, 14)).ravel()) == set(range(1, tokens))


def test_rows_can_be_asked_for_in_any_grouping():
    rows = np.arange(300)
    whole = WindowOrder(101, sequence_length=7, seed=3).starts(rows)
    order = WindowOrder(101, sequence_length=7, seed=3)
    assert np.array_equal(whole[37:], order.starts(rows[37:]))
    assert np.array_equal(whole[:37], order.starts(rows[:37]))


def test_the_order_of_a_seed_is_the_same_on_every_machine_and_version():
    golden = [62, 13, 20, 76, 34, 48, 55, 90]
    assert WindowOrder(101, sequence_length=7, seed=3).starts(np.arange(8)).tolist() == golden
    assert WindowOrder(101, sequence_length=7, seed=4).starts(np.arange(8)).tolist() != golden


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 97, 1000, 4099])
def test_a_permutation_is_one_to_one_on_any_size(size: int):
    for key in ("a", "b"):
        assert np.array_equal(np.sort(Permutation(size, key)(np.arange(size))), np.arange(size))


def test_permutations_are_spread_evenly_over_all_orders_and_places():
    orders = [tuple(Permutation(4, f"{key}")(np.arange(4))) for key in range(2400)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24 and ((counts - 100) ** 2 / 100).sum() < 49.7, "chi-square, 23 degrees, p = 0.001"
    neighbours = np.diff([Permutation(997, f"{key}")(np.array([500, 501])) for key in range(2400)])[:, 0] % 997
    counts = np.bincount((neighbours - 1) // 83, minlength=12)
    assert ((counts - 200) ** 2 / 200).sum() < 31.3, "chi-square, 11 degrees, p = 0.001"


def test_an_order_of_a_billion_windows_needs_no_memory_of_it():
    order = WindowOrder(2**41, sequence_length=1024, seed=0)
    starts = order.starts(np.array([0, 1, 2**31 - 2, 2**31 + 5]))
    assert len(set(starts.tolist())) == 4 and starts.max() < 2**41
    assert len(pickle.dumps(order)) < 1000


def mixture_of(folder: Path, sizes: list[int], weights: list[float], *, seed: int = 0) -> Mixture:
    """Texts whose tokens are all their own number."""
    texts = []
    for number, size in enumerate(sizes):
        np.full(size, number, np.uint16).tofile(folder / f"{number}.bin")
        tokens = Tokens(folder / f"{number}.bin", "uint16", 0, size)
        texts.append(ShuffledWindows(tokens, WindowOrder(size, sequence_length=7, seed=seed)))
    return Mixture(texts, block_shares(weights), seed=seed)


def test_every_block_of_rows_has_each_text_by_its_weight_whatever_the_sizes(tmp_path: Path):
    mixture = mixture_of(tmp_path, [50, 900, 4000], [3.0, 2.0, 1e-9])
    rows = np.arange(3 * BLOCK_ROWS)
    texts, within = mixture.places(rows)
    assert [np.bincount(block).tolist() for block in texts.reshape(3, -1)] == [[599, 400, 1]] * 3
    assert np.array_equal(mixture.windows(rows), np.repeat(texts[:, None], 8, 1))
    for text in range(3):
        assert np.array_equal(np.sort(within[texts == text]), np.arange((texts == text).sum())), "none twice, none left"
    runs = np.diff(np.flatnonzero(np.diff(texts[:BLOCK_ROWS]))).max()
    assert runs < 40, "they are mixed, not one after the other"


def test_a_mixture_can_be_asked_in_any_grouping_and_follows_the_seed(tmp_path: Path):
    rows = np.arange(BLOCK_ROWS - 300, BLOCK_ROWS + 300)
    mixture = mixture_of(tmp_path, [400, 900], [1.0, 1.0])
    texts, within = mixture.places(rows)
    again = [mixture.places(part) for part in (rows[:123], rows[123:])]
    assert np.array_equal(np.concatenate([part[0] for part in again]), texts)
    assert np.array_equal(np.concatenate([part[1] for part in again]), within)
    assert not np.array_equal(mixture_of(tmp_path, [400, 900], [1.0, 1.0], seed=1).places(rows)[0], texts)


def test_shares_are_the_weights_to_a_thousandth():
    assert block_shares([3.0, 1.0]) == [750, 250]
    assert block_shares([1.0, 1.0, 1.0]) == [334, 333, 333]
    assert block_shares([1e-9, 5.0, 1e-9]) == [1, 998, 1]
