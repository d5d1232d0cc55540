"""Parsing replies: reasoning, content and tool calls, in the formats of several model families.

parse_reply(text, format) parses a whole text, ReplyParser pieces as they arrive.
"""

from h2o_cpp.reply.formats import FORMATS, GENERIC, ReplyFormat, format_named, format_of
from h2o_cpp.reply.grammar import call_grammar, form_grammar
from h2o_cpp.reply.parser import Reply, ReplyParser, ToolCall, parse_reply
from h2o_cpp.reply.rules import Rules, supported
from h2o_cpp.reply.scanner import Call, CallDelta, Content, NoCall, Part, Reasoning

__all__ = [
    "FORMATS",
    "GENERIC",
    "Call",
    "CallDelta",
    "Content",
    "NoCall",
    "Part",
    "Reasoning",
    "Reply",
    "ReplyFormat",
    "ReplyParser",
    "Rules",
    "ToolCall",
    "call_grammar",
    "form_grammar",
    "format_named",
    "format_of",
    "parse_reply",
    "supported",
]
