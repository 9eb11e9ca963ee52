"""Requests in OpenAI's form: what they ask for, answers, and the server that gives them."""
