"""A headless Chromium, spoken to through its debugging pipe."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find():
  """The path of a Chromium, or None."""
  named = os.environ.get("GYRE_CHROMIUM")
  found = [named] if named else [shutil.which(name) for name in _NAMES]
  return next((path for path in found if path), None)


class Browser:
  """One page of one browser."""

  def __init__(self, binary, profile):
    """Starts it with a profile of its own."""
    commands, self._write = os.pipe()
    self._read, answers = os.pipe()
    # The browser reads file 3 and writes file 4; these are neither.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
    os.close(commands)
    os.close(answers)
    flags = [
      "--headless=new",
      "--remote-debugging-pipe",
      "--no-first-run",
      "--disable-gpu",
      "--disable-dev-shm-usage",
      "--hide-scrollbars",
      f"--user-data-dir={profile}",
    ]
    if os.geteuid() == 0:
      flags.append("--no-sandbox")
    moved = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    self._process = subprocess.Popen(
      ["bash", "-c", moved, binary, *flags, "about:blank"],
      pass_fds=theirs,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    for fd in theirs:
      os.close(fd)
    self._rest, self._number, self._session = b"", 0, None
    self.errors, self.requests = [], []
    target = self.send("Target.createTarget", url="about:blank")["targetId"]
    attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.send(f"{domain}.enable")

  def _message(self, deadline):
    while b"\0" not in self._rest:
      left = deadline - time.monotonic()
      ready, _, _ = select.select([self._read], [], [], max(left, 0))
      if not ready:
        raise TimeoutError("the browser says nothing")
      got = os.read(self._read, 1 << 20)
      if not got:
        raise RuntimeError("the browser has ended")
      self._rest += got
    one, _, self._rest = self._rest.partition(b"\0")
    return json.loads(one)

  def _event(self, message):
    method, given = message.get("method"), message.get("params", {})
    if method == "Log.entryAdded" and given["entry"]["level"] == "error":
      self.errors.append(given["entry"]["text"])
    elif method == "Runtime.exceptionThrown":
      self.errors.append(given["exceptionDetails"]["text"])
    elif method == "Network.requestWillBeSent":
      self.requests.append(given["request"]["url"])

  def send(self, method, timeout=60, **given):
    """One command; returns its result."""
    self._number += 1
    body = {"id": self._number, "method": method, "params": given}
    if self._session:
      body["sessionId"] = self._session
    os.write(self._write, json.dumps(body).encode() + b"\0")
    deadline = time.monotonic() + timeout
    while True:
      message = self._message(deadline)
      if message.get("id") == self._number:
        if "error" in message:
          raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]
      self._event(message)

  def open(self, url, width, height):
    """Shows a page in a window of that size, until it says it is ready."""
    self.errors.clear()
    self.requests.clear()
    self.send(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=height,
      deviceScaleFactor=1,
      mobile=width < 600,
    )
    self.send("Page.navigate", url="about:blank")
    self.send("Page.navigate", url=url)
    deadline = time.monotonic() + 60
    while self.get("document.body && document.body.dataset.ready") != "1":
      if time.monotonic() > deadline:
        raise TimeoutError(f"{url} is not ready: {self.errors}")
      time.sleep(0.05)

  def get(self, expression):
    """The value of an expression in the page, as JSON has it."""
    found = self.send(
      "Runtime.evaluate",
      expression=expression,
      returnByValue=True,
      awaitPromise=True,
    )
    if "exceptionDetails" in found:
      raise RuntimeError(found["exceptionDetails"])
    return found["result"].get("value")

  def wait(self, expression):
    """Waits until an expression holds."""
    deadline = time.monotonic() + 30
    while not self.get(f"Boolean({expression})"):
      if time.monotonic() > deadline:
        raise TimeoutError(expression)
      time.sleep(0.05)

  def picture(self, path, *, whole=False):
    """Writes what the window shows, or the whole page, as PNG."""
    found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
    path.write_bytes(base64.b64decode(found["data"]))

  def close(self):
    """Ends the browser."""
    self._session = None
    self.send("Browser.close")
    self._process.wait(30)
    os.close(self._write)
    os.close(self._read)
