"""Images in container registries: references, the client of the registries' API, pull and push."""
