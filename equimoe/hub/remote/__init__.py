"""The Hugging Face Hub: a repository to push to, a commit of one to read from."""
