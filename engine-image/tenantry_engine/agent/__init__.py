"""Stands before vLLM in the pods of a pool of that type: signed identities in, OpenAI's API out, adapters by digest.

vLLM listens on the pod's loopback and knows no tenant. What is asked of it goes through here alone.
"""
