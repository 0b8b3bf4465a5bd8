"""The bridge protocol, which OpenAI's Agents SDK uses to drive a Cloudflare Sandbox."""
