"""One file per dialect: how a family of backends wants operators spelled."""
