"""A model on a page in the browser, and for programs that ask as they ask OpenAI's API."""
