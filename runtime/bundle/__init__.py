"""The bundle on disk: its manifest, the contract of its graphs, hashes, and reading files safely."""
