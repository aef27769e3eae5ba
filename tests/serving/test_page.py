"""The page in headless Chromium: files, batches, errors, the key, the keyboard."""

import json

import pytest
from helpers.servers import flags, request, serving

browser = pytest.importorskip("helpers.browser", reason="needs the extra test-page")
pytestmark = pytest.mark.skipif(None in (browser.CHROMIUM, browser.DRIVER),
                                reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def driver(downloads):
    with browser.chromium(downloads) as driver:
        yield driver


@pytest.fixture
def page(driver, words_model, tmp_path):
    """The page of a server without files."""
    with serving(flags(words_model, tmp_path / "data")) as served:
        page = browser.Page(driver, served.url)
        page.find("#state", "running")
        yield page
        assert page.problems() == []


def lines_of(folder, count: int) -> list[list[dict]]:
    """Return the lines of complete downloads, if there are enough."""
    paths = [path for path in folder.iterdir() if path.suffix == ".jsonl"]
    return [[json.loads(line) for line in path.open()] for path in paths] * (len(paths) >= count)


def test_batch_from_upload_to_results_by_keyboard(page, tmp_path, downloads):
    page.upload(tmp_path / "in.jsonl", [request(str(number), prompt="w1", max_tokens=4)
                                        for number in range(12)])
    page.press("start")
    page.find("#batches .status", "completed")
    assert "12 of 12 requests" in page.find("#batches .figures").text
    page.press("results")
    results, = page.wait(lambda _: lines_of(downloads, 1), "there is no download")
    assert {line["custom_id"] for line in results} == {str(number) for number in range(12)}


def test_lines_of_an_invalid_file_are_shown(page, tmp_path):
    page.upload(tmp_path / "<img src=x>.jsonl", [request("a", prompt="w1"), "<b>no</b>\n"])
    page.click("start")
    assert page.find("#batches .messages li").text.startswith("line 2: ")
    assert page.find("#batches .name").text == "<img src=x>.jsonl"
    assert not page.driver.find_elements("css selector", "img, b")


def test_failed_requests_are_shown_with_their_lines(page, tmp_path):
    page.upload(tmp_path / "in.jsonl", [
        request("good", prompt="w1", max_tokens=2), request("<i>bad</i>", prompt="w1", n=-1)])
    page.click("start")
    page.find("#batches .figures", "1 failed")
    page.click("show")
    assert page.find("#batches .messages li").text.startswith("<i>bad</i>: line 2: ")


def test_dropped_file_is_uploaded_and_deleted(page):
    page.driver.execute_script("""
        const data = new DataTransfer();
        data.items.add(new File(["{}"], "dropped.jsonl"));
        document.getElementById("drop").dispatchEvent(
            new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));""")
    page.find("#files .name", "dropped.jsonl")
    page.click("delete")
    page.driver.switch_to.alert.accept()
    page.find("#no-files")


def test_running_batch_is_cancelled(page, tmp_path):
    page.upload(tmp_path / "in.jsonl", [
        request(str(number), prompt="w1", max_tokens=100, min_tokens=100)
        for number in range(2000)])
    page.click("start")
    page.find("#batches .figures", "tokens/s")
    page.click("cancel")
    page.find("#batches .status", "cancelled")


def test_page_asks_for_the_key_until_it_is_right(driver, words_model, tmp_path, downloads):
    before = len(lines_of(downloads, 0))
    with serving(flags(words_model, tmp_path / "data", "--api-key", "secret")) as served:
        page = browser.Page(driver, served.url)
        for key in ("wrong", "secret"):
            page.find("#key").send_keys(key + "\n")
            page.find("#problem" if key == "wrong" else "#state",
                      "wrong" if key == "wrong" else "running")
        page.upload(tmp_path / "in.jsonl", [request("a", prompt="w1", max_tokens=2)])
        page.click("start")
        page.click("results")
        page.wait(lambda _: lines_of(downloads, before + 1), "there is no download")
        assert driver.current_url == f"{served.url}/"
        assert "secret" not in driver.page_source


def test_page_connects_again_after_a_restart(driver, words_model, tmp_path):
    with serving(flags(words_model, tmp_path / "data")) as served:
        page = browser.Page(driver, served.url)
        page.find("#state", "running")
    page.find("#state", "no connection")
    port = served.url.rpartition(":")[2]
    with serving([*flags(words_model, tmp_path / "data"), "--port", port]):
        page.find("#state", "running")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_contrast_and_fits_a_phone(driver, page, scheme):
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True})
    try:
        color, background, width = driver.execute_script("""
            const style = getComputedStyle(document.body);
            return [style.color, style.backgroundColor, document.documentElement.scrollWidth];""")
        levels = [sum(json.loads(f"[{text.split('(')[1].rstrip(')')}]")[:3])
                  for text in (color, background)]
        assert (levels[0] < levels[1]) == (scheme == "light") and abs(levels[0] - levels[1]) > 500
        assert width <= 360
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
