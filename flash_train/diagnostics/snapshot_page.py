"""One or two memory snapshots as a page that needs no network: a timeline each, and the sites that allocated."""

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flash_train.diagnostics.snapshot import Recording, Snapshot, compare, load_snapshot, replay
from flash_train.memory.sizes import human_bytes

# Okabe and Ito's palette and its lighter half; what has no colour of its own is grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D3A9B", "#F0E442",
            "#66A9D1", "#E59E66", "#66C4AB", "#B4A0CD")  # fmt: skip
_REST = "everything else"
_ROWS = 60


def write_snapshot_page(
    page: str | Path, first: str | Path | Snapshot, second: str | Path | Snapshot | None = None, *,
    names: Sequence[str] = (), device: int | None = None, marks: Iterable[tuple[float, str]] = (),
) -> None:  # fmt: skip
    """Write an HTML file that shows memory snapshots of torch's (`torch.cuda.memory._dump_snapshot`, `MemorySnapshot`).

    One snapshot: allocated bytes by time, coloured by the place in the code that allocated them, and a table of these
    with their stacks. Two: both on one scale, and the sites that one has and the other lacks, or has more of.

    >>> frames = [{"filename": "model.py", "line": 7, "name": "forward"}]
    >>> events = [{"action": "alloc", "addr": 1, "size": 4096, "stream": 0, "time_us": 5, "frames": frames}]
    >>> write_snapshot_page("page.html", {"segments": [], "device_traces": [events]})  # doctest: +SKIP

    Args:
        page: the file to write.
        first, second: a pickle, or what `torch.cuda.memory._snapshot()` returned.
        names: of the snapshots, for titles; by default the files'.
        device: whose memory is shown; None: of each the one with the most events.
        marks: (microseconds on the snapshots' clock, which is Unix time, text), drawn as lines; of those before a
            recording's first event the last, at its beginning.

    Raises:
        ValueError: a file is no snapshot, has no recorded allocations, or none of `device`.
    """
    given = [first] if second is None else [first, second]
    snapshots = [load_snapshot(each) if isinstance(each, str | Path) else each for each in given]
    recordings = [replay(each, device=device) for each in snapshots]
    titles = [str(each) if isinstance(each, str | Path) else f"snapshot {index}" for index, each in enumerate(given, 1)]
    titles = [*names, *titles[len(names) :]]
    tables = _sites_table(recordings[0]) if second is None else _differences(*recordings, titles=titles)
    colours, marks = _colours(recordings), list(marks)
    charts = [{"title": title, **_chart(each, colours, marks)} for title, each in zip(titles, recordings, strict=True)]
    headings = [
        f"<figure><figcaption><b>{html.escape(title)}</b>, device {each.device}: at most {human_bytes(each.peak)} "
        f"({each.events:,} events)</figcaption><canvas></canvas></figure>"
        for title, each in zip(titles, recordings, strict=True)
    ]
    # "</script>" in a file's name would end the data.
    data = json.dumps({"charts": charts}, separators=(",", ":")).replace("<", "\\u003c")
    title = " beside ".join(titles)
    body = f"<div class=charts>{''.join(headings)}</div><p id=hover></p>"
    Path(page).write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        f"<style>{_part('css')}</style>"
        f"<h1>Allocated memory by the place that allocated it</h1>{body}{tables}"
        f"<script type=application/json id=data>{data}</script><script>{_part('js')}</script></html>\n"
    )


def _part(kind: str) -> str:
    return Path(__file__).with_suffix(f".{kind}").read_text()


def _colours(recordings: Sequence[Recording]) -> dict[str, str]:
    """One colour for a site, whichever recording it is in: for those that are most at the peaks."""
    sizes: dict[str, int] = {}
    for recording in recordings:
        for site in recording.sites:
            sizes[site.name] = max(sizes.get(site.name, 0), site.at_peak, site.most // 2)
    return dict(zip(sorted(sizes, key=lambda name: -sizes[name]), _COLOURS, strict=False))


def _chart(recording: Recording, colours: dict[str, str], marks: list[tuple[float, str]]) -> dict[str, Any]:
    series = [name for name in colours if any(site.name == name for site in recording.sites)]
    rows = [
        [*(own := [point.get(name, 0) for name in series]), sum(point.values()) - sum(own)]
        for point in recording.points
    ]
    return {
        "names": [*series, _REST],
        "colours": [*(colours[name] for name in series), "#BBBBBB"],
        "times": [round(time, 6) for time in recording.times],
        "rows": rows,
        "marks": _marks(recording, marks),
    }


def _marks(recording: Recording, marks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """In seconds since the first event. A step begins before its first event; and where the oldest events are lost,
    the recording begins within a step, whose name is the last before it."""
    seconds = sorted(((time - recording.began) / 1e6, text) for time, text in marks)
    before = [(0.0, text) for time, text in seconds if time < 0]
    return before[-1:] + [mark for mark in seconds if mark[0] >= 0]


def _sites_table(recording: Recording) -> str:
    shown = recording.sites[:_ROWS]
    rows = [
        (_site(site.name, site.stack), human_bytes(site.at_peak), human_bytes(site.most), f"{site.count:,}")
        for site in shown
    ]
    return _table("Sites", ("allocated by", "at the peak", "at most", "allocations"), rows, len(recording.sites))


def _differences(first: Recording, second: Recording, *, titles: Sequence[str]) -> str:
    stacks = {site.name: site.stack for each in (second, first) for site in each.sites}
    pairs = compare(first, second)
    tables = []
    for heading, kept in (
        (f"Only in {titles[0]}", [pair for pair in pairs if not pair.second and pair.first]),
        (f"Only in {titles[1]}", [pair for pair in pairs if not pair.first and pair.second]),
        ("In both", [pair for pair in pairs if pair.first and pair.second]),
    ):
        rows = [
            (_site(pair.name, stacks[pair.name]), human_bytes(pair.first), human_bytes(pair.second),
             human_bytes(pair.second - pair.first))
            for pair in kept[:_ROWS]
        ]  # fmt: skip
        tables.append(_table(heading, ("allocated by, at most", *titles, "difference"), rows, len(kept)))
    return "".join(tables)


def _site(name: str, stack: Sequence[str]) -> str:
    if not stack:
        return html.escape(name)
    frames = html.escape("\n".join(stack))
    return f"<details><summary>{html.escape(name)}</summary><pre>{frames}</pre></details>"


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], number: int) -> str:
    """`rows` are HTML; `number`: of all there are."""
    head = "".join(f"<th>{html.escape(column)}" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}' for cell in row)}" for row in rows) or "<tr><td>none"
    more = f"<p>{number - len(rows)} more" if number > len(rows) else ""
    return f"<h2>{html.escape(heading)}</h2><table><tr>{head}{body}</table>{more}"
