"""Bytes and memory: every offset (`layout`), every message (`wire`), every ordering operation (`publish`), every socket
(`channel`), and the segment they live in (`segment`). Nothing here decides what a token means."""
