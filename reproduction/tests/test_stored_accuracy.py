"""Stored comparisons of simulation with real runs: each names its profile's tables, and the pages say what the files hold."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from places import ROOT

from cbatch.sim import load_profile
from reproduction.bench.page import TABLES
from reproduction.papers import gallery
from reproduction.validation.compare import gpus_of, tables_of
from reproduction.validation.stored import served_before

RESULTS = ROOT / "reproduction" / "results"
ROW = re.compile(r"^\| (h\d+): ([\w, -]+) \| `([\w-]+)` \| ([\w ]+)(, earlier)? \|$", re.MULTILINE)
PAGE = (ROOT / "reproduction" / "validation" / "README.md").read_text()
LISTED = {
    f"{card}/{name}": (profile, tables, bool(earlier))
    for card, names, profile, tables, earlier in ROW.findall(PAGE)
    for name in names.split(", ")
}


def stored() -> dict[str, Mapping[str, Any]]:
    """Returns what names the profile in each file with measured and simulated figures, by folder and name."""
    texts = {path: path.read_text() for path in sorted(RESULTS.glob("h[12]00/*.json"))}
    found = {path: json.loads(text) for path, text in texts.items() if '"simulated"' in text}
    return {
        f"{path.parent.name}/{path.stem}": kept.get("errors", {}).get("profile", kept) for path, kept in found.items()
    }


def test_the_page_lists_the_tables_of_every_stored_comparison() -> None:
    assert {name: (kept["profile"], kept.get("tables", "not recorded")) for name, kept in stored().items()} == {
        name: listed[:2] for name, listed in LISTED.items()
    }


@pytest.mark.parametrize("name", [name for name, (_, _, earlier) in LISTED.items() if not earlier])
def test_a_stored_comparison_is_of_the_shipped_tables(name: str) -> None:
    """If this fails, simulate the file again, and correct the pages that state its errors; or list it as earlier."""
    profile, tables, _ = LISTED[name]
    gpus = gpus_of(json.loads((RESULTS / f"{name}.json").read_text()).get("cases", {"": {"": {}}}))
    assert tables == tables_of(load_profile(profile), gpus)


def test_every_stored_file_is_named_by_a_document_or_a_command() -> None:
    """A file is named by its name, by `name=`, as a figure that is made, or by a pattern of the page of measured speed. Other files are not read."""
    sources = [path for folder in ("docs", "reproduction", "tests/support") for path in (ROOT / folder).rglob("*.*")]
    text = "\n".join(path.read_text() for path in sources if path.suffix in (".md", ".py", ".yaml"))
    patterns = [f"paper/{name}.*" for name in (*gallery.names(), *gallery.landscape())]
    patterns += ["README.md", *(section["files"] for section in TABLES["sections"])]
    unnamed = [
        path
        for path in RESULTS.rglob("*.*")
        if path.name not in text and f"name={path.stem}" not in text and not any(map(path.match, patterns))
    ]
    assert not unnamed


def test_a_comparison_that_is_simulated_again_keeps_its_measurement(tmp_path: Path) -> None:
    once = {"hardware": "card 1", "date": "2026-11-01", "commit": "abc", "runs": []}
    (tmp_path / "once.json").write_text(json.dumps(once))
    _, first = served_before(str(tmp_path / "once.json"))
    (tmp_path / "again.json").write_text(json.dumps({**once, "commit": "def", **first}))
    assert served_before(str(tmp_path / "again.json"))[1] == first and first["measured"]["commit"] == "abc"


def test_documents_name_the_tables_of_the_files_they_cite() -> None:
    cited = {
        (page.name, name)
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"results/(h[12]00/[\w-]+)\.json", page.read_text())
        if name in LISTED
    }
    assert ("prefix-cache.md", "h100/sessions") in cited
    assert not [(page, name) for page, name in cited if LISTED[name][1] not in (ROOT / "docs" / page).read_text()]


def test_the_page_of_the_prefix_cache_states_the_stored_errors() -> None:
    runs = json.loads((RESULTS / "h100" / "sessions.json").read_text())["runs"]
    page = (ROOT / "docs" / "prefix-cache.md").read_text()
    errors = {
        name: [run["simulated"][name] / run["measured"][name] - 1 for run in runs]
        for name in ("TPOT mean", "TTFT mean")
    }
    hits = [run["simulated"]["hit share"] - run["measured"]["hit share"] for run in runs]
    assert all(error < 0 for values in errors.values() for error in values)
    for name, values in errors.items():
        assert f"mean {name[:4]} by {-100 * max(values):.1f} to {-100 * min(values):.1f}%" in page
    assert f"within {100 * max(map(abs, hits)):.2f} points" in page


def test_rows_that_the_prefix_caches_command_keeps_are_of_the_shipped_tables() -> None:
    rows = pd.read_csv(RESULTS / "prefix_cache" / "hits.csv")
    assert {*rows.loc[rows["policy"] != "one at a time", "tables"]} == {tables_of(load_profile("h100"))}
