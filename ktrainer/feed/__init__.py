"""The user's data as this process's shares of the global batches."""

from __future__ import annotations

from ktrainer.feed.make import make_feed
from ktrainer.feed.place import place_facts, take_place
from ktrainer.feed.share import Feed, Share, bounds

__all__ = ["Feed", "Share", "bounds", "make_feed", "place_facts", "take_place"]
