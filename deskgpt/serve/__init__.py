"""Pages and programs' interfaces to a model: chat, playground, OpenAI's API."""
