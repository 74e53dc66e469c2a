"The website builds without a fault, the README is the index notebook, and the tree speaks of no machine but the reader's."
import re
import shutil
import subprocess

import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import root
from kimi_spec.site import build_site, readme

ROOT = root()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The whole site, built once and strictly: its sources and its pages."
    project = tmp_path_factory.mktemp("whole")
    shutil.copytree(ROOT / "nbs", project / "nbs")
    shutil.copy(ROOT / "_quarto.yml", project)
    return project / "nbs", build_site(project=project)


@pytest.fixture
def sources(tmp_path):
    "A site of one page."
    (tmp_path / "nbs").mkdir()
    shutil.copy(ROOT / "nbs/core/errors.ipynb", tmp_path / "nbs/index.ipynb")
    (tmp_path / "_quarto.yml").write_text("project: {type: website}\nwebsite: {title: One, sidebar: {contents: [index.ipynb]}}\n")
    return tmp_path


def pages(nbs):
    "Every notebook as the page it should become."
    return {path.relative_to(nbs).with_suffix(".html").as_posix() for path in nbs.rglob("*.ipynb")}


def test_every_notebook_is_a_page(whole):
    nbs, site = whole
    assert {path.relative_to(site).as_posix() for path in site.rglob("*.html")} == pages(nbs)


def test_every_page_is_in_the_sidebar(whole):
    nbs, site = whole
    home = (site / "index.html").read_text()
    sidebar = home[home.index('id="quarto-sidebar"'):home.index("<main")]
    assert not {page for page in pages(nbs) if f'href="{page}"' not in sidebar}


def test_a_dead_link_stops_a_strict_build_only(sources):
    site = build_site(project=sources)
    config = sources / "_quarto.yml"
    config.write_text(config.read_text().replace("[index.ipynb]", "[index.ipynb, gone.ipynb]"))
    with pytest.raises(KimiSpecError, match="faults"):
        build_site(project=sources)
    assert build_site(project=sources, strict=False) == site  # over the old one


def test_other_folders_are_not_overwritten(sources):
    with pytest.raises(KimiSpecError, match="is no site"):
        build_site("nbs", project=sources)


def test_no_renderer(sources, monkeypatch):
    monkeypatch.setattr("kimi_spec.site.shutil.which", lambda name: None)
    monkeypatch.setattr("kimi_spec.site.find_spec", lambda name: None)
    with pytest.raises(KimiSpecError, match="neither quarto nor smalldocs"):
        build_site(project=sources)


def test_quarto_goes_first_and_its_warnings_count(sources, monkeypatch, tmp_path_factory):
    tools = tmp_path_factory.mktemp("tools")
    quarto = tools / "quarto"
    quarto.write_text('#!/bin/sh\nmkdir -p "$2/_site"\necho "{}" > "$2/_site/search.json"\nif [ -e "$2/noisy" ]; then echo "WARN: a dead link"; fi\n')
    quarto.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    assert (build_site(project=sources) / "search.json").read_text() == "{}\n"
    (sources / "nbs/noisy").touch()
    with pytest.raises(KimiSpecError, match="1 warnings, the first: WARN: a dead link"):
        build_site(project=sources)


def test_readme_is_the_index_notebook():
    assert (ROOT / "README.md").read_text() == readme(ROOT)


def test_readme_opens_with_the_commands_and_its_links_hold():
    text = (ROOT / "README.md").read_text()
    assert text.index("make findings") < text.index("## ") and text.index("make test") < text.index("## ")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def tree():
    "Text files that git keeps or would keep."
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.stat().st_size < 5e6 and b"\0" not in (content := path.read_bytes()):
            yield name, content.decode(errors="replace")


def test_nothing_names_the_machine_it_was_made_on():
    local = re.compile("|".join(["/" + r"work/\w", "/" + r"root/\w", "/" + r"home/\w", r"\.py" + "env/", "/" + "tmp/tmp", "ipykernel_" + r"\d"]))
    assert not [f"{name}: {found[0]}" for name, text in tree() if (found := local.search(text))]
