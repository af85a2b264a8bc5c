"""Check folders that a site was built into: `python -m tests.docs.built_site out/docs out/docs-zensical`.

Every folder has the same pages, every link and anchor leads somewhere, and a browser takes nothing from the network.
The exit code is 1 if something is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Tags whose address a browser opens by itself, and the attribute that holds it.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@dataclass
class Page(HTMLParser):
    """What one page names."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") != "canonical":
            self.loaded.append(values[LOADED[tag]])


def find(sites: list[Path]) -> Iterator[str]:
    """Yield a line for each thing that is wrong."""
    names = [{path.relative_to(site) for path in site.rglob("*.html")} for site in sites]
    for site, pages in zip(sites[1:], names[1:], strict=True):
        yield from (f"{site / page}: no such page" for page in sorted(names[0] - pages))
        yield from (f"{sites[0] / page}: no such page" for page in sorted(pages - names[0]))
    for site in sites:
        yield from _problems(site)


def _problems(site: Path) -> Iterator[str]:
    pages = {path: _parsed(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses begin at the root of a server
            continue
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    yield f"{path}: taken from the network: {address}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{path}: leads nowhere: {address}"
                continue
            anchors = next((other.anchors for known, other in pages.items() if known.resolve() == target), set())
            if parts.fragment and unquote(parts.fragment) not in anchors:
                yield f"{path}: no such anchor: {address}"


def _parsed(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


def main() -> int:
    """Print what is wrong with the sites that are named."""
    findings = list(find([Path(name) for name in sys.argv[1:]]))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
