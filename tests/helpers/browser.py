"""The page of a server in headless Chromium. Needs the extra `test-page`."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from helpers.servers import DEADLINE

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
"""Debian's packages chromium and chromium-driver; None if one is not installed."""


@contextmanager
def chromium(downloads: Path) -> Iterator[webdriver.Chrome]:
    """Start a browser that saves downloads in a folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # Containers run tests as root and have a small /dev/shm.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """A page, and what a user does there."""

    def __init__(self, driver: webdriver.Chrome, url: str):
        self.driver = driver
        driver.get("about:blank")
        driver.get_log("browser")  # forget what other pages have reported
        driver.get(url)

    def wait(self, is_reached, message: str):
        """Return the value of a function of the driver once it is true."""
        return WebDriverWait(self.driver, DEADLINE, 0.05, [StaleElementReferenceException]).until(
            is_reached, message)

    def find(self, selector: str, text: str = "") -> WebElement:
        """Wait for a visible element that contains a text."""
        return self.wait(lambda driver: next(
            (element for element in driver.find_elements(By.CSS_SELECTOR, selector)
             if element.is_displayed() and text in element.text), None),
            f"there is no {selector} with {text!r}")

    def upload(self, path: Path, lines: list) -> None:
        """Choose a file of requests."""
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n"
                                for line in lines))
        self.find("#upload").send_keys(str(path))
        self.find("#files .name", path.name)

    def click(self, name: str) -> None:
        """Click the first button of a class."""
        self.find(f"button.{name}").click()

    def press(self, name: str) -> None:
        """Press the first button of a class, by the keyboard alone."""
        target = self.find(f"button.{name}")
        for _ in range(50):
            ActionChains(self.driver).send_keys(Keys.TAB).perform()
            if self.driver.switch_to.active_element == target:
                break
        style = "return getComputedStyle(document.activeElement).outlineStyle"
        assert self.driver.execute_script(style) == "solid"
        ActionChains(self.driver).send_keys(Keys.ENTER).perform()

    def problems(self) -> list[str]:
        """Return what the browser has reported, such as violations of the page's policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")
                if entry["level"] not in ("DEBUG", "INFO")]
