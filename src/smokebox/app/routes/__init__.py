"""The routes of an app, resource by resource."""
