"""docs/architecture.md lists the files that a query passes."""

from tests.architecture import PAGE, query_path, replaced


def test_the_page_lists_the_files_that_a_query_passes() -> None:
    page = PAGE.read_text()
    assert page == replaced(page, {"path": query_path()}), "run: python tests/test_docs.py"
