"""Bytes to events and back, sans-I/O: no asyncio, no sockets, no clock, nothing of server/ or engine/."""
