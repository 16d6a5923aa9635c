"""What tests of pages look at: the tree of tags, and the texts between them."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Tree(HTMLParser):
    """A page, whose tags must be closed in order; `texts` are what a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data.strip().replace("\u00a0", " "))

    @property
    def text(self) -> str:
        """All texts, a line each."""
        return "\n".join(self.texts)

    def addresses(self) -> set[str]:
        """What the page would load or lead to."""
        names = ("src", "href", "srcset", "data", "action", "xlink:href")
        return {value for _, attributes in self.tags for name in names if (value := attributes.get(name))}
