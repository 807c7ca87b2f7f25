"""From token ids to text and from conversations to prompts."""
