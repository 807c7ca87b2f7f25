"""The decode loop and what it is made of: proposals, acceptance, planning, KV caches, sampling, grammars."""
