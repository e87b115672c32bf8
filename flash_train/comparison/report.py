"""report.html: the whole comparison on one page that needs no network, no script and no other file."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from flash_train.comparison import filling, table
from flash_train.comparison.results import Cell, Row
from flash_train.comparison.text import human_bytes, human_seconds
from flash_train.comparison.verdict import Verdict

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.verdict { font-size: 1.25rem; line-height: 1.4; }
.problem { border-left: 4px solid #D55E00; padding-left: .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th:nth-child(2), td:nth-child(2), .facts th, .facts td { text-align: left; }
.named th, .named td { text-align: right; } .named th:first-child, .named td:first-child { text-align: left; }
.scroll { overflow-x: auto; } figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
code, pre { font-family: ui-monospace, monospace; font-size: .85rem; } pre { white-space: pre-wrap; }
</style>
</head>
<body>
<p class="verdict">$sentence</p>
$problems
<h1>$title</h1>
<p>$setting</p>
<div class="scroll">$summary</div>
$warnings
$charts
$filling
<h2>What the verdict rests on</h2>
<ul>$notes</ul>
<h2>Peak memory by phase</h2>
<div class="scroll">$phases</div>
<h2>To repeat it</h2>
<pre>$command</pre>
<div class="scroll">$facts</div>
</body>
</html>
""")

_PHASE_HEADINGS = ("T", "attention", "forward", "backward", "optimizer", "validation", "retries", "run took")


def report_html(
    *,
    title: str,
    setting: str,
    verdict: Verdict,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    charts: Mapping[str, Path],
    found: Sequence[filling.Filling] = (),
    facts: Mapping[str, object],
    command: str,
) -> str:
    """The page. `charts` are SVG files by their captions; `found` what fills the memory of each arm; `facts` the
    environment, versions and commit by name."""
    told = (*verdict.refusals, *verdict.problems)
    return _PAGE.substitute(
        title=html.escape(title),
        setting=html.escape(setting),
        sentence=html.escape(verdict.sentence),
        problems="".join(f'<p class="problem">{html.escape(problem)}</p>' for problem in told),
        summary=_table(table.columns(cells), table.body(cells)),
        warnings=_sentences("Warnings", verdict.warnings),
        charts="".join(_figure(caption, path) for caption, path in charts.items()),
        filling=_filling(found),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in verdict.notes),
        phases=_table(_PHASE_HEADINGS, [_phases(row) for row in rows if row.measured and row.status == "ok"]),
        command=html.escape(command),
        facts=_facts(facts),
    )


def _sentences(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f"<h2>{title}</h2>\n<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _filling(found: Sequence[filling.Filling]) -> str:
    if not found:
        return ""
    tables = ((f"What fills the peak at T={found[0].length:,}", filling.by_category), ("By module", filling.by_module))
    shown = "".join(
        f'<h2>{title}</h2>\n<div class="scroll named">{_table(*tabulate(found))}</div>' for title, tabulate in tables
    )
    return shown + _sentences("What would take less", filling.advice(found))


def _figure(caption: str, path: Path) -> str:
    """An SVG file inline: without its XML prolog, which belongs to files, and with identifiers of its own."""
    svg = path.read_text()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{path.stem}-", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(caption)}"', 1)
    return f"<figure>{svg}</figure>"


def _phases(row: Row) -> list[str]:
    peaks = (
        row.forward_peak_allocated_bytes,
        row.backward_peak_allocated_bytes,
        row.optimizer_peak_allocated_bytes,
        row.validation_peak_allocated_bytes,
    )
    retries = "-" if row.alloc_retries is None else f"{row.alloc_retries}"
    written = ["-" if peak is None else human_bytes(peak) for peak in peaks]
    return [f"{row.length}", row.arm, *written, retries, human_seconds(row.seconds)]


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(entry)}</td>" for entry in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _facts(facts: Mapping[str, object]) -> str:
    lines = (
        f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    return f'<table class="facts">{"".join(lines)}</table>'
