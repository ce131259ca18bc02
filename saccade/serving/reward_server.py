"""The HTTP side of a reward service: POST /get_reward, and GET /health, /info and /metrics.

server = open_server(service, "127.0.0.1", 8400, token="sesame")
threading.Thread(target=server.serve_forever).start()
"""

from __future__ import annotations

import hashlib
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

from saccade.serving import http
from saccade.serving.rewards import RewardService

PATH = "/get_reward"
ROOM = 2  # largest requests that fit into memory at once


def open_server(service: RewardService, host: str, port: int, *, token: str) -> ThreadingHTTPServer:
    largest = service.serve.max_body_mb * 2**20
    room = http.Room(ROOM * largest)
    gate = http.Gate(token=token, largest_body=largest, public=("/health",), room=room)
    return http.open_server(partial(Handler, service, gate), host, port, token=token)


class Handler(http.JsonHandler):
    def __init__(self, service: RewardService, gate: http.Gate, *args: Any) -> None:
        self.service, self.gate = service, gate
        super().__init__(*args)

    def do_POST(self) -> None:
        self.route({PATH: self._get_reward})

    def do_GET(self) -> None:
        info = partial(self._tell, self.service.info)
        self.route({"/health": self._health, "/info": info, PATH: info, "/metrics": self._metrics})

    def _get_reward(self) -> None:
        with self.service.replying():
            body, digest = self.read_json(), hashlib.sha256(self.body).hexdigest()
            self.send_json(200, self.service.answer(body, digest=digest))

    def _tell(self, what: Any) -> None:
        self.send_json(200, what())

    def _health(self) -> None:
        self.send_json(503 if self.service.draining else 200, self.service.health())

    def _metrics(self) -> None:
        self.send_data(200, self.service.metrics().encode(), "text/plain; version=0.0.4")
