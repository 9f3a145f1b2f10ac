"""The smallest engine: a chat endpoint of OpenAI's API. Two of them: kyb up --pods examples/own_engine.yaml"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # /health, /v1/models
        self.answer({"object": "list", "data": [{"id": options.model, "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {"role": "assistant", "content": f"{options.model} received: {request['messages'][-1]['content']}"}
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        self.answer({"id": "1", "object": "chat.completion", "model": options.model, "choices": [choice]})

    def answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


ThreadingHTTPServer((os.environ.get("POD_IP", "127.0.0.1"), options.port), Engine).serve_forever()
