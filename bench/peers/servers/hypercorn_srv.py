"""hypercorn's asyncio server on uvloop, in process. Argument: the port."""

import sys

import uvloop
from asgi_raw import app
from hypercorn.asyncio import serve
from hypercorn.config import Config

config = Config()
config.bind = [f"127.0.0.1:{sys.argv[1]}"]
config.backlog = 4096
config.accesslog = None
config.loglevel = "WARNING"
uvloop.run(serve(app, config, mode="asgi"))
