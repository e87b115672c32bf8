"""What a validation says of its sources, and of all of them."""

import math

import pytest

from flash_train.training.evaluation import score_sources, total_score


def test_all_sources_together_are_weighed_by_their_tokens_and_their_bytes() -> None:
    scores = score_sources([(30.0, 10.0), (90.0, 90.0)], {"web": 4.0, "code": 2.0})
    assert (scores["web"].loss, scores["web"].perplexity) == (3.0, pytest.approx(math.e**3))
    assert scores["web"].bits_per_byte == pytest.approx(30.0 / math.log(2) / 40)
    total = total_score(list(scores.values()))
    assert (total.tokens, total.loss) == (100, pytest.approx(1.2))
    assert total.bits_per_byte == pytest.approx(120.0 / math.log(2) / (40 + 180))


def test_where_the_bytes_of_one_source_are_unknown_there_are_no_bits_per_byte_of_all() -> None:
    scores = score_sources([(30.0, 10.0), (90.0, 90.0)], {"web": 4.0, "code": None})
    assert "bits_per_byte" in scores["web"].metrics() and "bits_per_byte" not in scores["code"].metrics()
    assert list(total_score(list(scores.values())).metrics()) == ["loss", "perplexity"]


def test_a_source_that_a_limited_validation_did_not_reach_has_no_score() -> None:
    scores = score_sources([(30.0, 10.0), (0.0, 0.0)], {"web": 4.0, "code": None})
    assert list(scores) == ["web"] and total_score(list(scores.values())).bits_per_byte is not None
