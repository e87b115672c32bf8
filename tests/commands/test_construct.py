"""A constructor's signature is the schema of its node."""

from pathlib import Path
from typing import Literal

import pytest

from flash_train.commands.construct import build


class Lamp:
    def __init__(
        self,
        *,
        watts: float,
        colours: list[str] | None = None,
        count: int = 1,
        on: bool = True,
        socket: Literal["E14", "E27"] = "E27",
        manual: Path | str = "",
        shade: "Lamp | None" = None,
    ) -> None:
        self.watts, self.colours, self.count, self.shade = watts, colours, count, shade


LAMP = f"{__name__}.Lamp"


def test_a_node_is_built_with_the_nodes_inside_it_and_what_is_wired_in() -> None:
    node = {"_target_": LAMP, "watts": 5, "colours": ["red"], "shade": {"_target_": LAMP, "watts": 0.5}}
    lamp = build(node, key="lamp", wired={"count": 3})
    assert (lamp.watts, lamp.colours, lamp.count, lamp.shade.watts) == (5, ["red"], 3, 0.5)
    assert build({"_target_": LAMP, "_partial_": True}, key="lamp")(watts=7).watts == 7


def test_what_is_wired_in_is_not_given_a_second_time() -> None:
    with pytest.raises(ValueError, match="lamp.count follows from other settings"):
        build({"_target_": LAMP, "watts": 5, "count": 2}, key="lamp", wired={"count": 3})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"wats": 5}, "lamp takes no 'wats'; did you mean watts?"),
        ({"watts": "5"}, "lamp.watts must be float, got '5'"),
        ({"watts": True}, "lamp.watts must be float, got True"),
        ({"watts": None}, "lamp.watts must be float, got None"),
        ({"watts": 5, "count": 1.5}, "lamp.count must be int, got 1.5"),
        ({"watts": 5, "on": 1}, "lamp.on must be bool, got 1"),
        ({"watts": 5, "colours": "red"}, r"lamp.colours must be list\[str\] | None, got 'red'"),
        ({"watts": 5, "colours": [1]}, r"lamp.colours must be list\[str\] | None, got \[1\]"),
        ({"watts": 5, "socket": "E40"}, "lamp.socket must be E14 or E27, got 'E40'"),
        ({"watts": 5, "shade": {"_target_": LAMP, "watts": "5"}}, "lamp.shade.watts must be float, got '5'"),
        ({}, "lamp: missing a required argument: 'watts'"),
        ({"_target_": "flash_train.nowhere.Lamp"}, "lamp._target_ names nothing that can be imported"),
    ],
)
def test_what_does_not_fit_the_signature_is_named(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said.replace('|', '[|]')}"):
        build({"_target_": LAMP, **wrong}, key="lamp")
