"""Damage, hostile input and interruptions, by the hundred: does anything go wrong silently?"""
