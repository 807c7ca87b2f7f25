"""What was asked for -> a recipe: everything that an export writes, and its cost."""
