"""JSON schemas as people write them, for answers that must follow one."""

from __future__ import annotations

from typing import Any

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["human", "elf", 7, None]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "any object": {"type": "object"},
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "number"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "more properties": {
        "type": "object",
        "properties": {"a": {"const": "é😀\n"}},
        "additionalProperties": {"type": "integer"},
    },
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "boolean"}], "items": False, "minItems": 2},
    "int64": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
            "size": {"type": "integer", "exclusiveMinimum": 0, "maximum": 2**63 - 1},
        },
        "required": ["id", "size"],
        "additionalProperties": False,
    },
    "any of": {
        "anyOf": [{"type": "string", "maxLength": 5}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
    },
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["value", "left"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "patterns": {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
        },
        "required": ["code", "day", "id"],
        "additionalProperties": False,
    },
    "range": {
        "type": "array",
        "items": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
        "minItems": 3,
        "maxItems": 3,
    },
    "multiple": {
        "type": "object",
        "properties": {"n": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "string": {"type": "string", "minLength": 3, "maxLength": 8},
    "integer": {"type": "integer", "minimum": 0, "maximum": 99},
    "boolean": {"type": "boolean"},
    "pydantic": {
        "$defs": {
            "Step": {
                "title": "Step",
                "type": "object",
                "properties": {"text": {"title": "Text", "type": "string", "maxLength": 20}},
                "required": ["text"],
                "additionalProperties": False,
            }
        },
        "title": "Answer",
        "description": "what pydantic writes",
        "type": "object",
        "properties": {
            "steps": {"title": "Steps", "type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": 2},
            "final": {"default": None, "anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
        },
        "required": ["steps", "final"],
        "additionalProperties": False,
    },
}

# What can't be enforced, and what of it the refusal says.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "strin"),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"not": {}}, "not"),
    ({"$ref": "#/$defs/none"}, "none"),
    ({"$ref": "http://example.org/schema"}, "example.org"),
    ({"type": "string", "pattern": "("}, "regex"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"enum": []}, "Unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"properties": 5}, "properties"),
    ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in "ab"]} for i in range(20)]}, "large"),
]

# The same, of which llguidance says nothing.
BAD_NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 2**63}, "minimum"),
    ({"type": "array", "items": {"enum": [2**53 + 1]}}, "enum"),
    ({"type": "array", "items": {"const": {"a": [-(2**63)]}}}, "const"),  # it would end the process
]
